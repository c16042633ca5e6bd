#!/bin/sh
# Print the first Python that runs here and can make virtual environments; versions to try: the arguments, or these two.
[ $# -gt 0 ] || set -- 3.11 3.12
fits() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv[1:])' "$@" 2>/dev/null
}
for version in "$@"; do
  # Where several Pythons are installed by pyenv, the one asked for may need to be named.
  for candidate in "python$version" "$(PYENV_VERSION=$version pyenv which "python$version" 2>/dev/null)" python3 python; do
    if [ -n "$candidate" ] && fits "$candidate" "$version"; then
      command -v "$candidate"
      exit 0
    fi
  done
done
echo "No Python $(echo "$*" | sed 's/ / or /g') that can make virtual environments (on Debian: python3-venv) was found; install one, or name it: PYTHON=..." >&2
exit 1
