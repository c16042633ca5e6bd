"""Running text to sentences, by rule, for European languages and for Chinese and Japanese.

A full stop, question or exclamation mark ends a sentence where white space and a capital, a digit, an opening mark or a
letter without case follow; 。！？ end one wherever they stand. Marks that close a quotation stay with what they close.

What the rules cannot know: an abbreviation that also ends its sentence ("at 5 p.m. Then" stays one sentence if the
abbreviation is in the table), unlisted abbreviations before a capital (cut), German ordinals other than before a month
("der 2. Weltkrieg" is cut), sentences that start with a small letter (joined), and Thai and other writing without
marks. A wrong cut costs little in pretraining: a pair starts at another place.
"""

from __future__ import annotations

import re
import unicodedata

# Marks that close a quotation when they touch its end (in German and Polish “ and ‘ do), and French » after a space.
_CLOSERS = "(?:[\"'”’“‘»«›)\\]」』）】》〉]|[ \u00a0\u202f]»)*"
_END = re.compile(rf"[.!?…]+{_CLOSERS}(?=\s)|[。！？]+{_CLOSERS}(?:[。！？]+{_CLOSERS})?")
_LAST_WORD = re.compile(r"[^\s(\[\"'“‘«„—–/-]+$")
_NEXT_WORD = re.compile(r"\w+")
_OPENERS = frozenset("\"'“‘«‹„‚([¿¡「『（【《〈—–-•*")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Titles, as they are written before a name; never the end of a sentence.
_TITLES = _words(
    "Mr Mrs Ms Messrs Dr Drs Prof Rev Hon St Sr Jr Gen Col Maj Capt Lt Sgt Cpl Cmdr Adm Gov Sen Rep Pres Mt Ft "
    "Hr Fr Frl M MM Mme Mmes Mlle Mlles Me Mgr Sra Sres Srta Srs Ud Uds Vd Dña Sig Dott Avv Ing Dra Exmo Mevr Dhr"
)
# Abbreviations that call for what follows.
_ABBREVIATIONS = _words(
    "e.g i.e eg cf viz vs v al eds trans approx ca c bzw bsp evtl ggf inkl exkl vgl z.b d.h u.a s.o s.u z.t i.d.r "
    "u.u o.ä o.g sog geb gest zzgl str av pág págs bijv mme p.ex z d u"
)
# Words that are abbreviations only before a number.
_BEFORE_NUMBER = _words(
    "no nos nr núm vol vols ch chap fig figs abb eq eqs sec sect art abs p pp pag blz s "
    "jan feb mar apr jun jul aug sep sept oct nov dec"
)
_MONTHS = _words(
    "januar jänner februar märz april mai juni juli august september oktober november dezember "
    "januari februari maart mei augustus"
)


def split_sentences(text: str) -> list[str]:
    """The sentences of a paragraph, without white space around them; no character but such white space is lost."""
    found = []
    start = 0
    for end in _END.finditer(text):
        if end[0][0] in "。！？" or _is_end(text, start, end.start(), end.end()):
            found.append(text[start : end.end()])
            start = end.end()
    found.append(text[start:])
    return [s for s in (sentence.strip() for sentence in found) if s]


def _is_end(text: str, start: int, mark: int, stop: int) -> bool:
    """Whether the marks at text[mark:stop], which white space follows, end the sentence that began at `start`."""
    rest = text[stop : stop + 64].lstrip()
    if not rest:
        return True
    first = rest[0]
    if not (first in _OPENERS or unicodedata.category(first) in ("Lu", "Lt", "Lo", "Nd")):
        return False
    if text[mark:stop] != ".":  # two marks, or one that no abbreviation has
        return not (text[mark] == "…" and first.islower())
    word = _LAST_WORD.search(text, max(start, mark - 32), mark)
    if word is None:
        return True
    last = word[0]
    if last in _TITLES or last.lower() in _ABBREVIATIONS or (last.lower() in _BEFORE_NUMBER and first.isdigit()):
        return False
    if len(last) == 1 and last.isupper() and last != "I":  # an initial
        return False
    if last.isdigit():
        if len(last) <= 3 and not text[start : word.start()].strip():  # the number of an item
            return False
        following = _NEXT_WORD.match(rest)
        return not (len(last) <= 2 and following is not None and following[0].lower() in _MONTHS)
    return True
