"""Schema <- YAML files <- flags, strictly: a setting that is misspelled or mistyped is an error that says where."""

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hyvideo.config.flags import ALIASES, BOOLEANS, ELSEWHERE, OWN_SIZES, SYNONYMS, WITHOUT_EFFECT, build_parser
from hyvideo.config.outside import as_value_error, complain, read_file, with_home
from hyvideo.config.schema import Config
from hyvideo.config.settings import GROUPS, SETTINGS, Setting, nearest

_DEFAULTS: DictConfig = OmegaConf.structured(Config)  # to make it takes longer than all else here

_UNREADABLE = (
    *(OSError, yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError),
    *(AssertionError, AttributeError, LookupError, TypeError),
)
"""What reading a file may raise; the libraries raise the last ones for tags such as !!bool before something else."""


def load_config(argv: Sequence[str]) -> Config:
    """Build the configuration of a command line such as `sys.argv[1:]`.

    `--help` prints the manual and exits with 0. A run without `run_name` is named after its config files.

    An unreadable file, an unknown flag or key and a value of the wrong type are a ValueError. It names the flag or file
    and key, what was expected and received, and for unknown names the nearest real one.

    Example:
        >>> cfg = load_config(["--config", "configs/sage_8gpu.yaml", "configs/kl/moving.yaml", "--eta", "0.4"])
        >>> cfg.parallel.sp_size, cfg.kl.use_dual_kl, cfg.rollout.eta
        (2, False, 0.4)
    """
    given: dict[str, str] = {}
    for name in (word[2:].partition("=")[0] for word in argv if word.startswith("--")):
        setting = ALIASES[name].setting if name in ALIASES and ALIASES[name].is_name else name
        if setting in SETTINGS and given.setdefault(setting, name) != name:
            raise ValueError(f"--{given[setting]} and --{name} are one setting: keep one.")
    flags, rest = build_parser().parse_known_args(list(argv))
    if rest:
        if not rest[0].startswith("-"):
            advice = "it follows no flag (quote a value that contains spaces)"
            raise ValueError(f"unexpected value {_shown(rest[0])}: {advice}")
        unknown = [text for text in rest if text.startswith("--")] or rest[:1]
        told = [f"{_shown(text)}; {_advice(text.lstrip('-').partition('=')[0], SETTINGS, '--{}')}" for text in unknown]
        several = "\n  ".join([f"{len(told)} unknown flags (--help lists all):", *told])
        raise ValueError(several if len(told) > 1 else f"unknown flag {told[0]} (--help lists all)")
    values = vars(flags)
    for name in [name for name in values if name in WITHOUT_EFFECT]:
        del values[name]
        complain(f"post_train.py: --{name} has no effect: {WITHOUT_EFFECT[name]}.", once=True)
    files = values.pop("config")
    if own_size := str(values.get("validation_fixed_size", "")).lower() == "none":
        del values["validation_fixed_size"]
    config = deepcopy(_DEFAULTS)
    for file in files:
        _merge_file(config, file)
    for name, text in sorted(values.items(), key=_aliases_first):
        if name in SETTINGS and SETTINGS[name].kind is dict and len(text) == 1:
            (text,) = text
        cleared = name in SETTINGS and SETTINGS[name].optional and str(text).strip().lower() in ("none", "null")
        _set(config, name, None if cleared else text, f"--{name}")
    cfg = OmegaConf.to_object(config)
    if own_size:
        resolution = "720p" if "720p" in cfg.model.pretrained_transformer_version else "480p"
        cfg.validation.validation_fixed_size = OWN_SIZES[resolution]
    if cfg.run.run_name is None:
        cfg.run.run_name = "-".join(Path(file).stem for file in files) or "default"
    return cfg


def load_saved_config(path: str | Path) -> Config:
    """Read the configuration that `save_config` wrote; fields the file does not have take the schema's default."""
    config = deepcopy(_DEFAULTS)
    _merge_file(config, path)
    return OmegaConf.to_object(config)


def save_config(cfg: Config, path: str | Path) -> None:
    """Write every value of `cfg`, by group, as YAML that `--config` and `load_saved_config` read back unchanged."""
    Path(path).write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(cfg))), encoding="utf-8")


def _merge_file(config: DictConfig, path: str | Path) -> None:
    """Assign everything a YAML file says, flat or grouped."""
    seen: dict[str, tuple[str, object]] = {}
    for where, name, value in _entries(path):
        if name in seen:
            raise ValueError(f"{where}: given twice, also as {seen[name][0]}; keep one")
        seen[name] = where, value
    for name, (where, value) in sorted(seen.items(), key=_aliases_first):
        _set(config, name, value, where)


def _aliases_first(item: tuple[str, object]) -> bool:
    """The order in which one source's (name, value) act: what a setting's own name says counts most."""
    return item[0] not in ALIASES


def _entries(path: str | Path) -> Iterator[tuple[str, str, object]]:
    """Yield (where it stands, name, value) of every setting and alias in a YAML file, which may be empty."""
    with as_value_error(f"config file '{path}' cannot be read as YAML settings", *_UNREADABLE):
        content = OmegaConf.to_container(OmegaConf.load(io.BytesIO(read_file(path))), resolve=False)
    if not isinstance(content, Mapping):
        raise ValueError(f"config file '{path}' must hold `key: value` lines; received a list")
    if any(isinstance(leaf, int) and leaf.bit_length() > 10_000 for leaf in _leaves(content)):
        raise ValueError(f"config file '{path}' holds a number of thousands of digits, which nothing here expects")
    for key, value in content.items():
        if key not in GROUPS:
            yield f"{path}: {key}", _known(key, path, (*SETTINGS, *GROUPS)), value
            continue
        if not isinstance(value, Mapping | None):
            raise ValueError(f"{path}: {key} is a group and expects settings below it; received {_shown(value)}")
        names = [setting.name for setting in SETTINGS.values() if setting.group == key]
        for name, inner in (value or {}).items():
            known = _known(name, f"{path}: {key}", names)
            if known in SETTINGS and SETTINGS[known].group != key:
                raise ValueError(f"{path}: {name} belongs to group {SETTINGS[known].group}; received under {key}")
            yield f"{path}: {key}.{name}", known, inner


def _known(key: object, where: str, candidates: Sequence[str]) -> str:
    """The setting or alias that a YAML key names, or an error that names the nearest candidate."""
    if key in ALIASES:
        return ALIASES[key].setting if ALIASES[key].is_name else key
    if key not in SETTINGS:
        advice = _advice(str(key), candidates, "'{}'")
        raise ValueError(f"{where}: unknown key {_shown(key)}; {advice}")
    return key


def _advice(name: str, candidates: Iterable[str], form: str) -> str:
    """Say which name was probably meant, in the form in which one writes it."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    if known := SYNONYMS.get(name.lower().replace("-", "_")):
        return f"here it is called {form.format(known)}"
    return f"the nearest is {form.format(nearest(name, candidates))}"


def _set(config: DictConfig, name: str, value: object, where: str) -> None:
    """Set what a setting or an alias names."""
    if name in SETTINGS:
        _assign(config, SETTINGS[name], value, where)
        return
    alias = ALIASES[name]
    if alias.only:
        if str(value) not in alias.only:
            raise ValueError(f"{where}: expected only {alias.only[0]!r}; received {_shown(value)}")
        return
    setting, on = SETTINGS[alias.setting], BOOLEANS.get(str(value).strip().lower())
    if on is None:
        raise ValueError(f"{where}: expected true or false; received {_shown(value)}")
    now = OmegaConf.select(config, f"{setting.group}.{setting.name}")
    if alias.word:
        now = [word for word in now if word != alias.word] + [alias.word] * on
    elif not on:
        now = alias.off
    elif now == alias.off:
        now = setting.default
    _assign(config, setting, now, where)


def _assign(config: DictConfig, setting: Setting, value: object, where: str) -> None:
    """Convert `value` to the setting's type and set it; containers replace, they do not merge."""
    message = f"{where}: expected {setting.expected}; received {_shown(value)}"
    if setting.choices:
        message += f", the nearest is {nearest(str(value), setting.choices)!r}"
    try:
        prepared = _prepared(setting, value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{message} ({error})") from error
    place = f"{setting.group}.{setting.name}"
    try:
        OmegaConf.update(config, place, prepared, merge=False)
    except (OmegaConfBaseException, OverflowError) as error:
        raise ValueError(message) from error
    leaves = [*_leaves(prepared), OmegaConf.select(config, place)]
    if any(isinstance(leaf, int) and leaf.bit_length() > 64 for leaf in leaves):
        raise ValueError(f"{message} (a number below 2^64)")


def _prepared(setting: Setting, value: object) -> object:
    """Translate the spellings that omegaconf does not know, and refuse what it would read as something else."""
    if setting.kind is bool:
        return BOOLEANS.get(str(value).strip().lower())
    if setting.kind is dict and isinstance(value, str):
        value = json.loads(value) if value.lstrip().startswith(("{", "[")) else [value]
    if setting.kind is dict and isinstance(value, list):
        pairs = list(map(_pair, value))
        value = dict(pairs)
        if len(value) < len(pairs):
            raise ValueError("a name stands there twice")
    if setting.kind is list and isinstance(value, str):
        value = [value]
    if setting.kind is list and setting.choices and isinstance(value, list):
        known = [word for word in setting.choices if word in value]
        value = known + [word for word in value if word not in setting.choices]
    for leaf in _leaves(value):
        if isinstance(leaf, bool) and not setting.nested:
            raise ValueError("that is a boolean, as YAML reads yes, no, on and off too, unless they are quoted")
        if isinstance(leaf, str):
            if "${" in leaf or leaf == "???":  # omegaconf's references, by which a file could read the environment
                raise ValueError("'${...}' and '???' are not expanded here: write the value itself")
            leaf.encode()  # refuses what no file can hold
    return with_home(value)


def _pair(text: object) -> tuple[str, object]:
    """Read `name=value`; the value is JSON, or else a text."""
    name, equals, value = str(text).partition("=")
    if not equals:
        raise ValueError("that is not name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _leaves(value: object) -> Iterator[object]:
    """Keys and scalars of nested mappings and lists."""
    if isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    if not isinstance(value, list):
        yield value
        return
    for item in value:
        yield from _leaves(item)


def _shown(value: object) -> str:
    """A received value for a message: at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
