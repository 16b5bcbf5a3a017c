"""Reads what TensorBoard would: a run's curves, each in a folder of its own."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def events_of(folder):
    return EventAccumulator(
        str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0}
    ).Reload()


def curves_of(folder):
    """Curve -> tag -> step -> value; the run's own values are the curve ""."""
    curves = {}
    for run in sorted({path.parent for path in folder.rglob("events.out*")}):
        events = events_of(run)
        curves["" if run == folder else run.relative_to(folder).as_posix()] = {
            tag: {point.step: point.value for point in events.Scalars(tag)}
            for tag in events.Tags()["scalars"]
        }
    return curves
