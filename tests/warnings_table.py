"""What the trainings of `health_programs` are warned of; as a program, which get which warnings,
and how many of them are wrong or missing.

python tests/warnings_table.py [cpu | gpu]
"""

from __future__ import annotations

import gc
import sys
import tempfile
import warnings

import health_programs as programs
import torch
import training

from memcallback import MemoryCallback, MemoryWarning

NUM_EPOCHS = 4


def warnings_of(program, accelerator, **settings):
    """What a training warns of, in order.

    Args:
        program: The training.
        accelerator: As for the Trainer.
        settings: As for `MemoryCallback`.
    """
    options = {
        "max_epochs": NUM_EPOCHS,
        "accelerator": accelerator,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 10,
    } | program.options
    others = options.pop("callbacks", [])
    callback = MemoryCallback(**({"predict": False, "warnings": True} | settings))
    gc.collect()  # the garbage of other trainings is not to go meanwhile
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            training.trainer(folder, [callback, *others], **options).fit(
                program.module(), program.data()
            )
        except torch.OutOfMemoryError:
            # What the warning has foretold.
            assert program.ends_out_of_memory
        else:
            assert not program.ends_out_of_memory
    assert not callback._is_broken
    return [str(one.message) for one in caught if issubclass(one.category, MemoryWarning)]


def warnings_of_named(group, name, accelerator, **settings):
    """The same of a training by its name, for a process of its own."""
    programs.GLOBAL_LOSSES.clear()
    return warnings_of(getattr(programs, group)[name], accelerator, **settings)


def main(accelerator):
    wrong = missing = 0
    for title, group in (("healthy", programs.HEALTHY), ("sick", programs.SICK)):
        for name, program in group.items():
            told = warnings_of(program, accelerator)
            right = [
                text
                for text in told
                if program.names and all(word in text for word in program.names)
            ]
            wrong += len(told) - len(right)
            missing += title == "sick" and not right
            print(f"{title:8}{name:36}{' | '.join(told) or 'no warning'}", file=sys.stderr)
    print(
        f"{len(programs.HEALTHY)} healthy, {len(programs.SICK)} sick: {wrong} wrong warnings, "
        f"{missing} missing",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["cpu"]))
