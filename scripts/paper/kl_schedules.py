"""Schedules of the KL coefficient (paper A.6, Fig. 7) for a KL at its target, a large one, and one that falls.

Example: `python -m scripts.paper.kl_schedules`
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from hyvideo.grpo.kl_controller import KLController, Schedule
from scripts.paper.drawing import BLUE, ORANGE, RED, legend_below, new_figure, tidy
from scripts.paper.study import FAILS, HOLDS, Claim, Study, paragraph

CEILING, FLOOR, WARMUP, UPDATES = 1e-5, 1e-7, 100, 250
TARGET, LARGE, SMALL, FALL = 1.0, 3.0, 0.3, 170
"""KL in units of kl_target, and the update at which the last trajectory falls from large to small."""
STYLES = {"fixed": (RED, "--"), "two_stage": (BLUE, "-"), "milder": (ORANGE, "-.")}


def find() -> dict[str, Any]:
    """The coefficient at every update, for each KL trajectory and each schedule."""
    courses = {
        "at its target": [TARGET] * UPDATES,
        "large": [LARGE] * UPDATES,
        "large, then small": [LARGE] * FALL + [SMALL] * (UPDATES - FALL),
    }
    return {
        "settings": {"kl_weight": CEILING, "kl_min_coef": FLOOR, "kl_warmup_updates": WARMUP},
        "coefficient": {
            name: {schedule: _coefficients(schedule, course) for schedule in STYLES} for name, course in courses.items()
        },
    }


def _coefficients(schedule: Schedule, course: Sequence[float]) -> list[float]:
    """Lambda of each update, when the updates before it showed this KL trajectory."""
    controller = KLController(max_coef=CEILING, min_coef=FLOOR, warmup_updates=WARMUP, target=1.0, schedule=schedule)
    return [controller.coefficient, *(controller.update(kl) for kl in course[:-1])]


def draw(found: Mapping[str, Any]) -> Figure:
    """One panel per KL trajectory, one line per schedule."""
    figure = new_figure(10, 3.3)
    panels = figure.subplots(1, 3, sharey=True)
    for axes, (course, schedules) in zip(panels, found["coefficient"].items(), strict=True):
        for schedule, (colour, line) in STYLES.items():
            axes.plot(range(1, UPDATES + 1), schedules[schedule], line, color=colour, linewidth=1.6, label=schedule)
        axes.axvline(WARMUP, color="0.6", linewidth=0.8, linestyle=":")
        axes.set_yscale("log")
        tidy(axes, title=f"KL {course}", xlabel="optimizer update")
    panels[0].set_ylabel("KL coefficient λ", fontsize=9)
    panels[0].text(WARMUP + 4, 1.3e-7, "end of the warm-up", fontsize=8, color="0.3")
    legend_below(figure, panels[0], columns=3)
    return figure


def describe(found: Mapping[str, Any]) -> str:
    """Say what the controller does."""
    settings = found["settings"]
    large = found["coefficient"]["large"]["two_stage"]
    return paragraph(
        f"""`two_stage` raises λ linearly from {settings["kl_min_coef"]:g} to `kl_weight`
        {settings["kl_weight"]:g} over {settings["kl_warmup_updates"]} updates and then follows the mean of the last 10
        KLs. `milder` does the same below a tenth of that ceiling, and `fixed` never moves. The panels show the
        controller at its defaults, for a KL at its target, at {LARGE:g} times the target, and at {LARGE:g} times until
        update {FALL} and {SMALL:g} times after it. A large KL *lowers* λ by a tenth per update, to the floor
        {large.index(large[-1], WARMUP) - WARMUP} updates after the warm-up; a small KL raises it again."""
    )


def claims(found: Mapping[str, Any]) -> Sequence[Claim]:
    """The controller relaxes when the KL is large."""
    wanted, large, falling = (schedules["two_stage"] for schedules in found["coefficient"].values())
    relaxed = wanted[-1] == CEILING and large[-1] == FLOOR and falling[-1] > falling[FALL]
    return [
        Claim(
            "after a linear warm-up λ is relaxed while the KL is large and raised while it is small",
            HOLDS if relaxed else FAILS,
            f"{wanted[-1]:.0e} at the target, {large[-1]:.0e} after a large KL, {falling[-1]:.0e} when it has fallen; "
            "true by construction",
        ),
    ]


STUDY = Study("kl_schedules", "Schedules of the KL coefficient", draw, describe, claims)

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    STUDY.publish(find())
