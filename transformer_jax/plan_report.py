"""A plan as a dictionary for `--json`, and as text for people. Each figure comes with how far it can be trusted."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformer_jax import hlo_text
from transformer_jax.plan import FREE_SHARE, Plan
from transformer_jax.topologies import GIB

MIB = 2.0**20
DAY = 86400.0
TPU_TRUST = {
    "pod, mesh, batch": "exact",
    "memory": "as this libtpu lays it out; keep 5 % free at run time",
    "collectives": "exact for this libtpu; their times are bounds from published rates",
    "flops": "exact; as if each row were one sequence that fills it",
    "step": "a model and bounds, never checked against a chip; about 30 % either way",
    "whole run": "the step's time alone: no evaluation, saving, start or restart",
}
GPU_TRUST = {
    "devices, mesh, batch": "exact",
    "memory": "parameters, optimizer and gradients exact; activations an estimate; no compiled peak is claimed",
    "flops": "exact; as if each row were one sequence that fills it",
    "step": "the products at the published peak rate: no run comes near it",
}


def report(plan: Plan) -> dict[str, Any]:
    """Everything that is known, with bytes, seconds and FLOPs as numbers; lists of two are a least and a most."""
    figures, pod, times = plan.figures, plan.pod, plan.times
    tpu = pod.chip.kind == "tpu"
    found: dict[str, Any] = {
        "run": plan.run,
        "pod": {
            "name": pod.name, "chip": pod.chip.name, "chips": pod.chips, "hosts": pod.hosts, "devices": pod.devices,
            "slices": pod.slices,
        },
        "mesh": figures.mesh,
        "settings": plan.settings,
        "compiled": plan.form,
        "run_form": plan.run_form,
        "batch": {
            "rows": plan.batch_size, "rows_per_device": plan.rows * plan.accumulate, "parts": plan.accumulate,
            "slots": plan.slots, "tokens": figures.tokens,
        },
        "parameters": figures.parameters,
        "fits": plan.fits,
        "memory": _memory(plan),
        "flops": figures.flops,
        "steps": plan.steps,
    }  # fmt: skip
    if times is not None:
        seconds = {f.name: getattr(times, f.name) for f in dataclasses.fields(times)}
        # Of GPUs no operations are known, and so no upper bound.
        found["step_seconds"] = {name: value for name, value in seconds.items() if name != "most" or value}
        found["bound"] = times.bound
        if times.least:
            span = [times.least, times.most] if times.most else [times.least]
            found["days"] = [plan.steps * t / DAY for t in span]
            found["chip_hours"] = [plan.steps * t * pod.chips / 3600 for t in span]
        if times.most:
            found["tokens_per_second"] = [figures.tokens / t for t in (times.most, times.least)]
            found["flops_share"] = [figures.flops / (t * pod.peak_flops) for t in (times.most, times.least)]
    if figures.schedule is not None:
        found["collectives"] = [
            {"kind": c.kind, "group": c.group, "count": c.count, "bytes": c.bytes, "count_ahead": c.ahead,
             "bytes_ahead": c.bytes_ahead, "ring_bytes": hlo_text.ring_bytes(c)}
            for c in figures.schedule.collectives
        ]  # fmt: skip
        found["cycles"] = figures.schedule.cycles
        found["most_cycles"] = figures.schedule.by_name
        found["unpriced"] = figures.schedule.unpriced
    if tpu:
        found["rematerializations"] = list(figures.rematerializations)
        found["compile"] = {
            "cpu_seconds": figures.cpu_seconds,
            "rss_bytes": figures.rss_bytes,
            "cached": figures.cached,
        }
    if figures.shortage is not None:
        found["largest_arrays"] = list(figures.shortage.largest)
    if plan.fit is not None:
        found["would_fit"] = dataclasses.asdict(plan.fit)
    return found | {
        "versions": figures.versions,
        "notes": list(plan.notes),
        "trust": TPU_TRUST if tpu else GPU_TRUST,
    }


def _memory(plan: Plan) -> dict[str, float]:
    """Bytes of a device."""
    figures, limit = plan.figures, plan.pod.chip.usable_bytes
    found = {"parameters": figures.parameter_bytes, "optimizer": figures.optimizer_bytes, "limit": limit}
    if plan.pod.chip.kind == "gpu":
        found |= {"gradients": figures.parameter_bytes, "activations_estimate": figures.kept_bytes}
        total = plan.gpu_bytes
        return found | {"estimate": total, "margin": 1 - total / limit}
    if figures.shortage is not None:
        limit, needed = figures.shortage.available, figures.shortage.needed
        return found | {"limit": limit, "needed": needed, "missing": needed - limit, "margin": 1 - needed / limit}
    peak = figures.peak_bytes
    return found | {"other": peak - plan.state_bytes, "peak": peak, "margin": 1 - peak / limit}


def render(found: dict[str, Any]) -> str:
    """The report as text."""
    pod, batch = found["pod"], found["batch"]
    tpu = "compile" in found
    slices = f", {pod['slices']} slices" if pod["slices"] > 1 else ""
    settings = found["settings"]
    lines = [
        f"{found['run']} on {pod['name']}: {pod['chips']:,} x {pod['chip']}, hosts {pod['hosts']:,}, "
        f"devices {pod['devices']:,}{slices}",
        *(f"note: {note}" for note in found["notes"]),
        _line("mesh", ", ".join(f"{k} {v}" for k, v in found["mesh"].items())
              + f"; preset {settings['mesh.preset']}, remat {settings['model.remat']}"),
        _line("batch", f"{batch['rows']:,} rows of {batch['slots']}: {batch['rows_per_device']:,} a device"
              + (f", in {batch['parts']} parts" if batch["parts"] > 1 else "")
              + f"; {batch['tokens']:,.0f} tokens a step if all places hold one"),
        _line("parameters", f"{found['parameters']:,}, padding rows included"),
    ]  # fmt: skip
    if tpu:
        form = found["compiled"]
        same = (
            "as the run's" if form == found["run_form"] else f"the run's is {found['run_form']}; --quick was asked for"
        )
        lines.append(_line("compiled", f"layers {form} ({same}); {_compiler(found)}"))
    lines += ["", *_memory_lines(found["memory"], tpu)]
    if not found["fits"]:
        lines += _what_would_fit(found)
    lines += _collective_lines(found)
    if "step_seconds" in found:
        lines += ["", *_time_lines(found, tpu)]
    lines += ["", "how far to trust it"]
    lines += [f"  {name:<21}{text}" for name, text in found["trust"].items()]
    return "\n".join(lines)


def _line(name: str, text: str) -> str:
    return f"{name:<15}{text}"


def _compiler(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    made = found["compile"]
    when = "kept from before" if made["cached"] else "now"
    return f"{versions}; {made['cpu_seconds']:.0f} CPU s and {made['rss_bytes'] / GIB:.1f} GiB, {when}"


def _memory_lines(memory: dict[str, float], tpu: bool) -> list[str]:
    names = {
        "parameters": "parameters",
        "optimizer": "optimizer moments",
        "gradients": "gradients",
        "activations_estimate": "activations (estimate)",
        "other": "activations, gradients and all else",
        "peak": "peak",
        "needed": "needed",
        "estimate": "together (estimate)",
    }
    lines = ["memory of a device (GiB)"]
    lines += [f"  {text:<38}{memory[key] / GIB:8.2f}" for key, text in names.items() if key in memory]
    tight = "" if memory["margin"] >= FREE_SHARE else "; too little: keep 5 % free"
    if "missing" in memory:
        lines.append(f"  {'limit':<38}{memory['limit'] / GIB:8.2f}   does not fit: "
                     f"{memory['missing'] / GIB:.2f} GiB too much")  # fmt: skip
    else:
        over = memory.get("estimate", 0.0) - memory["limit"]
        said = (
            f"does not fit, by this estimate: {over / GIB:.2f} GiB too much"
            if over > 0
            else f"{100 * memory['margin']:.0f} % free{tight}"
        )
        lines.append(f"  {'limit':<38}{memory['limit'] / GIB:8.2f}   {said}")
    return lines


def _what_would_fit(found: dict[str, Any]) -> list[str]:
    lines = [f"  largest: {entry}" for entry in found.get("largest_arrays", [])[:5]]
    fit = found.get("would_fit")
    if not fit:
        return lines
    if not fit["rows"]:
        return [
            *lines,
            f"  not even one row of a device would fit: whatever the batch, {fit['fixed_bytes'] / GIB:.2f} GiB are "
            'needed; split the state with mesh.preset "fsdp", or use more chips',
        ]
    tpu = found["compiled"] != "none"
    how = "a line through two larger batches, not compiled" if tpu else "by the same estimate"
    lines.append(
        f"  about {fit['rows']:,} rows of a device at once would fit with 5 % free ({fit['row_bytes'] / MIB:.1f} MiB a "
        f"row on {fit['fixed_bytes'] / GIB:.2f} GiB; {how})"
    )
    if fit["accumulate"] > 1:
        search = "; --search tries" if tpu else ""
        lines.append(f"  so try --train.accumulate {fit['accumulate']}, which leaves the batch as it is{search}")
    return lines


def _collective_lines(found: dict[str, Any]) -> list[str]:
    if not found.get("collectives"):
        return ["", "collectives: none"] if "collectives" in found else []
    lines = ["", "collectives of a step       group    count       MiB   started ahead"]
    for c in found["collectives"]:
        ahead = f"{c['bytes_ahead'] / c['bytes']:.0%}" if c["bytes"] else "-"
        lines.append(f"  {c['kind']:<24}{c['group'] or '-':>7}{c['count']:>9,.0f}{c['bytes'] / MIB:>10,.1f}{ahead:>16}")
    if any(c["kind"] == hlo_text.CROSS_SLICE for c in found["collectives"]):
        lines.append(f"  ({hlo_text.CROSS_SLICE} leaves the slice; its time is in no figure below)")
    whole = found["rematerializations"]
    if whole:
        lines.append(f"  warning: {len(whole)} involuntary full rematerialisations: {whole[0][:200]}")
    return lines


def _span(numbers: list[float], form: str, unit: str = "") -> str:
    texts = [format(n, form) for n in numbers]
    return (texts[0] if len(set(texts)) == 1 else f"{texts[0]} to {texts[-1]}") + unit


def _duration(days: list[float]) -> str:
    return _span(days, ",.1f", " days") if days[-1] >= 2 else _span([24 * d for d in days], ",.2f", " hours")


def _calibrated(found: dict[str, Any]) -> list[str]:
    """What a measurement of such chips makes of the step."""
    if "calibrated" not in found:
        return []
    by = found["calibrated"]
    memory = f", memory {by['memory_ratio']:.2f} x" if by["memory_ratio"] else ""
    return [
        f"  a step, calibrated            {1e3 * by['step_seconds']:,.1f}   {by['time_ratio']:.2f} x{memory}, measured "
        f"on {by['pod']} with {by['run']}, {by['when']}; the run: {_duration([by['days']])}"
    ]


def _time_lines(found: dict[str, Any], tpu: bool) -> list[str]:
    seconds = found["step_seconds"]
    ms = {name: 1e3 * value for name, value in seconds.items()}
    bound = {"products": "its products", "state": "its state's way through memory", "links": "its collectives"}
    rates = bool(seconds["least"])
    lines = [
        "time of a step (ms)",
        f"  model FLOPs at peak rate      {ms['products']:10.2f}   {found['flops'] / 1e12:,.1f} TFLOP"
        + ("" if rates else "; no rate is known for this device"),
    ]
    if not tpu:
        if rates:
            lines.append(f"  at least                      {ms['least']:10.2f}")
            lines += _calibrated(found)
            lines += ["", _line("whole run", f"{found['steps']:,} steps: at least {_duration(found['days'])}, "
                                f"{_span(found['chip_hours'], ',.1f')} chip-hours")]  # fmt: skip
        return lines
    unpriced = ", ".join(f"{n:,.0f} {name}" for name, n in sorted(found["unpriced"].items()))
    lines += [
        f"  state through memory once     {ms['state']:10.2f}",
        f"  collectives around rings      {ms['links']:10.2f}   of which nothing can hide {ms['links_waited']:.2f}",
        f"  operations, compiler's cycles {ms['operations']:10.2f}"
        + (f"   without price: {unpriced}" if unpriced else ""),
        f"  roofline                      bound by {bound[found['bound']]}",
        f"  a step                        {_span([ms['least'], ms['most']], ',.1f')}",
        *_calibrated(found),
        "",
        _line("tokens/s", _span(found["tokens_per_second"], ",.0f")),
        _line("share of peak", _span([100 * x for x in found["flops_share"]], ".0f", " % (model FLOPs)")),
        _line("whole run", f"{found['steps']:,} steps: {_duration(found['days'])}, "
              f"{_span(found['chip_hours'], ',.0f')} chip-hours"),
        "",
        "most cycles",
    ]  # fmt: skip
    for name, cycles in list(found["most_cycles"].items())[:5]:
        lines.append(f"  {cycles / found['cycles']:6.1%}  {name[-100:]}")
    return lines
