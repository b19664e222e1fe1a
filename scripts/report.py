"""Look at runs and models: reports, galleries, blind preference studies. Every page is one file that works offline.

  python -m scripts.report RUN                       report of a run folder: RUN/report.html
  python -m scripts.report RUN RUN ...               comparison of several runs: first RUN/comparison.html
  python -m scripts.report gallery A B ...           the same prompts and seeds side by side: A/gallery.html
  python -m scripts.report gallery A                 the seeds of each prompt side by side
  python -m scripts.report gallery A B ... --preference study
                                                     a blind study to hand out, and its key study.key.json
  python -m scripts.report winrates study.key.json VOTES ...
                                                     win rates of the votes that raters saved

RUN is a run folder; A, B are run folders (their last common validation) or folders of videos from generate.py. Any of
them may be written NAME=FOLDER to give it a name.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain, in_words, loading, printable
from hyvideo.data.files import claim_output
from scripts.reports.win_rates import CRITERIA, WinRate, read_votes, win_rates, write_votes

EMBED = "put the videos into the file, so that it can be sent alone"


def main(argv: list[str]) -> int:
    """Do what the command line asks; returns the exit status (0 done, 2 wrong input)."""
    commands = {"gallery": _gallery, "winrates": _winrates}
    command = commands.get(argv[0]) if argv else None
    try:
        return command(argv[1:]) if command else _report(argv)
    except (ValueError, OSError) as error:
        complain(f"scripts.report: {in_words(error)}")
        return 2


def _parser(command: str) -> argparse.ArgumentParser:
    return Parser(f"scripts.report{command}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


def _report(argv: Sequence[str]) -> int:
    parser = _parser("")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, or NAME=FOLDER")
    default = "report.html in RUN, comparison.html in the first of several"
    parser.add_argument("--output", type=Path, help=f"HTML file; default {default}")
    parser.add_argument("--embed", action="store_true", help=EMBED)
    arguments = parser.parse_args(argv)
    named = [_named_folder(text) for text in arguments.runs]
    with loading("scripts.report"):
        from scripts.reports.report import report_runs  # only now, for it takes seconds

    names, folders = zip(*named, strict=True)
    default = folders[0] / ("report.html" if len(folders) == 1 else "comparison.html")
    print(report_runs(folders, arguments.output or default, names, embed=arguments.embed))
    return 0


def _gallery(argv: Sequence[str]) -> int:
    parser = _parser(" gallery")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder of videos or run folder, or NAME=FOLDER")
    parser.add_argument("--output", type=Path, help="HTML file; default gallery.html in the first folder")
    parser.add_argument("--embed", action="store_true", help=EMBED)
    study = "write a blind preference study to a new folder"
    parser.add_argument("--preference", type=Path, metavar="FOLDER", help=study)
    parser.add_argument("--num_pairs", type=int, help="pairs of a study, drawn evenly over the models; default all")
    parser.add_argument("--seed", type=int, default=0, help="decides which pairs are drawn; default 0")
    arguments = parser.parse_args(argv)
    named = [_named_folder(text) for text in arguments.models]
    with loading("scripts.report"):
        from scripts.reports.gallery import read_models, write_gallery, write_study

    models = read_models(named)
    if arguments.preference is None:
        print(write_gallery(arguments.output or named[0][1] / "gallery.html", models, embed=arguments.embed))
        return 0
    key = write_study(arguments.preference, models, num_pairs=arguments.num_pairs, seed=arguments.seed)
    print(f"{arguments.preference / 'index.html'}\nkey, not for raters: {key}")
    return 0


def _winrates(argv: Sequence[str]) -> int:
    parser = _parser(" winrates")
    parser.add_argument("key", type=Path, help="the study's key, <folder>.key.json")
    parser.add_argument("votes", type=Path, nargs="+", help="files that raters saved, or merged before")
    parser.add_argument("--raters", nargs="+", metavar="NAME", help="who was asked; votes of others are refused")
    parser.add_argument("--merged", type=Path, help="write all votes to one file")
    arguments = parser.parse_args(argv)
    votes = read_votes(arguments.votes)
    num_votes = Counter(vote.rater for vote in votes)
    if arguments.raters and (others := sorted(set(num_votes) - set(arguments.raters))):
        raise ValueError(
            f"--raters: {', '.join(others)} voted too, and was not asked. Leave the file out, or add the name."
        )
    rates = win_rates(arguments.key, votes)
    if arguments.merged:
        claim_output(arguments.merged, [arguments.key, *arguments.votes])
        write_votes(arguments.merged, votes)
    print(printable("\n".join(_in_words(rate) for rate in rates)) or "No votes.")
    print(printable(f"raters: {', '.join(f'{name} ({number} votes)' for name, number in sorted(num_votes.items()))}"))
    return 0


def _in_words(rate: WinRate) -> str:
    return (
        f"{CRITERIA[rate.criterion][0]:20s} {rate.first} preferred to {rate.second}: {rate.rate:.1%} "
        f"[{rate.low:.1%}, {rate.high:.1%}], {rate.num_pairs} pairs, {rate.num_raters} rater(s), "
        f"votes {rate.wins} won, {rate.ties} tied, {rate.losses} lost"
    )


def _named_folder(text: str) -> tuple[str | None, Path]:
    """Split `NAME=FOLDER`; a folder that exists as written has no name."""
    name, equals, folder = text.partition("=")
    if not equals or Path(text).exists():
        return None, Path(text)
    if not name:
        raise ValueError(f"expected FOLDER or NAME=FOLDER; received '{text}'.")
    return name, Path(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
