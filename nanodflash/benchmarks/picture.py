"""A picture of a trace: what the threads and the device do, with and without overlap."""

from pathlib import Path

from nanodflash.engine.trace import TRACKS, Trace

COLOURS = {
    "plan": "#4c78a8",
    "read": "#f2cf5b",
    "commit": "#72b7b2",
    "text": "#9ecae9",
    "launch": "#b279a2",
}
BUSY, IDLE = "#54a24b", "#e45756"


def draw(traces: dict[str, Trace], path: Path, first_step: int, steps: int) -> None:
    """One panel a trace, over a window of some steps; waiting is left blank.

    Raises:
        ImportError: matplotlib is not installed (the `bench` extra).
    """
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(traces), 1, figsize=(10, 1.7 * len(traces)), sharex=True, layout="constrained"
    )
    for panel, (title, trace) in zip(panels, traces.items(), strict=True):
        spans = trace.with_idle()
        busy = sorted(span for span in spans if span[0] == "device" and span[1] == "step")
        begin, end = busy[first_step][2], busy[first_step + steps][2]
        for track, name, start, stop in spans:
            if name == "wait" or stop < begin or start > end:
                continue
            colour = IDLE if name == "idle" else COLOURS.get(name, BUSY)
            place = len(TRACKS) - 1 - TRACKS.index(track)
            bar = [(1e3 * (start - begin), 1e3 * (stop - start))]
            panel.broken_barh(bar, (place - 0.4, 0.8), color=colour)
        panel.set_yticks(range(len(TRACKS)), reversed(TRACKS))
        panel.set_xlim(0, 1e3 * (end - begin))
        panel.set_title(title, loc="left", fontsize=10)
    panels[-1].set_xlabel("ms")
    names = {"device busy": BUSY, "device idle": IDLE} | COLOURS
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in names.values()]
    figure.legend(patches, list(names), loc="outside lower center", ncols=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
