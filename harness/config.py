"""The configuration of one run: a dataclass per group of recipes/, composed by Hydra and checked here.

Group = folder = dataclass. Hydra composes and nothing more: no working directory of its own, no log files. Every wrong
value is a `ConfigError` of one line that names the field, what was expected and what was found.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from adapters.policy import GREEDY_RULES, Policy, PolicyError
from harness.traffic.sources import READS_DATA

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"
VERBATIM = ("url", "data", "out", "capture", "run", "why")  # free text: never read by Hydra's grammar
DRAFT_KINDS = ("dspark", "eagle3", "mtp-heads")
FIXED_ARMS = ("strict", "asd-b0", "chain")  # arms of a run whatever its policy: their names stand for one rule each
OWN = {  # fields of one task alone
    "bench": ("fixed_tokens", "aa", "block"),
    "gate": ("baseline", "chunk", "control", "mix_sampled", "repeat"),
    "calibrate": ("quantile", "items"),
}
UNARMED = "unarmed"  # the arm of an engine without our adapter
AGAIN = "-again"  # ends the name of the arm that repeats the baseline's policy


class ConfigError(ValueError):
    """A configuration that cannot run, in one line."""


def _at_least(owner: Any, group: str, low: float, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value >= low:
            raise ConfigError(f"{group}.{name}: expected a number >= {low}, found {value!r}")


def _one_of(group: str, name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{group}.{name}: expected one of {', '.join(choices)}, found {value!r}")


@dataclass
class ModelConfig:
    """A target and its draft. target, draft: hub id, or a folder (absolute, or relative to this checkout).

    gpus = 0: runs on a CPU. gpu_memory_gib: per GPU, for the reference context length.
    calibration: JSON file whose `policy` replaces a policy marked `calibrated`.
    policies: fields of a named policy that this model replaces. draft_kind: what the draft is (engine.drafts).
    dtypes: by engine, where it is not `dtype`; a dtype of the command line is for every engine.
    """

    name: str = ""
    target: str = ""
    draft: str = ""
    draft_kind: str = "dspark"
    revision: str | None = None
    draft_revision: str | None = None
    block_size: int = 7
    dtype: str = "auto"
    dtypes: dict[str, str] = field(default_factory=dict)
    gpus: int = 0
    gpu_memory_gib: int = 0
    engines: list[str] = field(default_factory=list)
    calibration: str | None = None
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for dtype in (self.dtype, *self.dtypes.values()):
            _one_of("model", "dtype", dtype, ("auto", "float32", "bfloat16", "float16"))
        _one_of("model", "draft_kind", self.draft_kind, DRAFT_KINDS)
        _at_least(self, "model", 1, "block_size")
        _at_least(self, "model", 0, "gpus", "gpu_memory_gib")
        for name in ("target", "draft"):
            if not getattr(self, name):
                raise ConfigError(f"model.{name}: expected a hub id or a folder, found nothing")


@dataclass
class PolicyConfig:
    """adapters.policy.Policy, with the temperature it is measured at and where its numbers come from."""

    name: str = ""
    rule: str = ""
    budget: float = 0.0
    gate: float = math.inf
    max_mismatches: int | None = None
    suffix_value: str = "suffix"
    epsilon: float | None = None
    alpha: float | None = None
    tau: float | None = None
    top_n: int | None = None
    delta: float | None = None
    ratio: float | None = None
    think_start: int | None = None
    think_end: int | None = None
    threshold_single: float | None = None
    threshold_acc: float | None = None
    temperature: float = 0.0
    calibrated: bool = False
    source: str | None = None

    def __post_init__(self) -> None:
        policy = self.policy
        _at_least(self, "policy", 0, "temperature")
        if (policy.rule in GREEDY_RULES) != (self.temperature == 0):
            wanted = "0 (a greedy rule)" if policy.rule in GREEDY_RULES else "> 0 (a rule for sampled requests)"
            raise ConfigError(f"policy.temperature: expected {wanted} for {policy.rule}, found {self.temperature}")

    @property
    def policy(self) -> Policy:
        values = {name: getattr(self, name) for name in Policy.__dataclass_fields__}
        try:
            return Policy(**values)
        except PolicyError as error:
            raise ConfigError(str(error)) from None


@dataclass
class EngineConfig:
    """An engine and how a process of it is started. Times in seconds.

    api: the client that speaks to it. requires: Python packages without which it cannot start here.
    adapter: the package that arms it. arguments: what the module is given before its flags.
    per_request_policy: false: a server has one policy, so every arm gets a server of its own.
    list_requests: a list request is scheduled in order, so batched runs of equal token streams are bit-equal.
    flags: `--name value` of the start command; true: `--name`; false and null: left out.
    cards: parts of GPU names it runs on (empty: any); cards_why: why, and what runs elsewhere.
    base: the engine this is a variant of. drafts: the kind of draft it takes. unarmed: module that starts the engine
    without its adapter (None: the same module, which is inert without a policy). unarmed_env: its environment beside
    ours. unarmed_why: why there is no such engine.
    fixed_width: false: how many drafts are verified follows the load, so no arm is an identity or accuracy arm.
    """

    name: str = ""
    base: str | None = None
    module: str = ""
    unarmed: str | None = None
    unarmed_env: dict[str, str] = field(default_factory=dict)
    unarmed_why: str | None = None
    api: str = "native"
    requires: list[str] = field(default_factory=list)
    adapter: str | None = None
    cuda: bool = False
    arguments: list[str] = field(default_factory=list)
    per_request_policy: bool = True
    list_requests: bool = False
    cards: list[str] = field(default_factory=list)
    cards_why: str = ""
    drafts: str = "dspark"
    fixed_width: bool = True
    max_running_requests: int = 16
    ready_timeout_s: float = 180.0
    request_timeout_s: float = 120.0
    device: str | None = None
    threads: int | None = None
    flags: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(self, "engine", 1, "max_running_requests", "threads")
        _one_of("engine", "drafts", self.drafts, DRAFT_KINDS)
        for name in ("ready_timeout_s", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"engine.{name}: expected seconds > 0, found {getattr(self, name)!r}")

    @property
    def kind(self) -> str:
        """The engine itself, of which this may be a variant."""
        return self.base or self.name


@dataclass
class LaunchConfig:
    """How the engine is brought up. stop_timeout_s: seconds between SIGTERM and SIGKILL.

    cores: CPU cores that each server process has for itself; the client keeps the rest (None: all share all).
    Of process alone: together: the servers of a run are up side by side, and its arms alternate over them; only one is
    asked at a time. They share the machine's memory: give each its part by engine.flags.
    replicas: servers of each arm, which share its items (None: one, or what the named image says). Of docker: each on
    GPUs of its own, asked side by side. Of process, in a bench: all on the same ones, asked in turn, item by item: what
    one server process differs from the next then shows, and the intervals of speed hold it.
    Of docker alone: gpus: device ids (None: 0, 1, ...). port: of the first replica on `publish` (None: a free one).
    publish: address the ports are bound to. hub_cache: the hub's cache on the engine's machine (None: this one's).
    offline: false: the container may download, into a cache that goes with it. code: where answers to coding items run.
    Of attach alone: foreign_adapter: true: measure, marked, a server with other adapter files.
    """

    name: str = ""
    stop_timeout_s: float = 20.0
    cores: int | None = None
    replicas: int | None = None
    gpus: list[int] | None = None
    port: int | None = None
    publish: str = "127.0.0.1"
    hub_cache: str | None = None
    offline: bool = True
    code: str = "process"
    foreign_adapter: bool = False
    together: bool = False

    def __post_init__(self) -> None:
        _one_of("launch", "name", self.name, ("process", "attach", "docker"))
        if self.together and self.name != "process":
            raise ConfigError(f"launch.together: belongs to launch=process, found it with launch={self.name}")
        _one_of("launch", "code", self.code, ("process", "container"))
        _at_least(self, "launch", 0, "stop_timeout_s")
        _at_least(self, "launch", 1, "replicas", "port", "cores")
        if self.cores is not None and self.name == "attach":
            raise ConfigError("launch.cores: of servers that are started here, found it with launch=attach")
        if (self.replicas or 1) > 1 and self.name == "attach":
            raise ConfigError("launch.replicas: of servers that are started here, found it with launch=attach")


@dataclass
class ImageConfig:
    """An image of recipes/docker-images and what its container needs. `auto`: the first that fits model and engine.

    folder: of its Dockerfile. folder_takes_engine: the Dockerfile has a target per engine. reference: the image to run
    (None: what `make images` built). replicas: servers where this image is named and launch.replicas is not.
    gpus: per server (None: the model's). cards: parts of GPU names it runs on (empty: any); cards_why: why.
    shm_gib, memory_gib, pids, cpus: limits of one container. ipc: `private` or `host`. env, flags: of the engine.
    """

    name: str = ""
    folder: str = ""
    folder_takes_engine: bool = False
    engine: str = ""
    models: list[str] = field(default_factory=list)
    reference: str | None = None
    replicas: int = 1
    gpus: int | None = None
    cards: list[str] = field(default_factory=list)
    cards_why: str = ""
    shm_gib: float = 1.0
    memory_gib: float | None = None
    cpus: float | None = None
    pids: int = 4096
    ipc: str = "private"
    env: dict[str, str] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of("image", "ipc", self.ipc, ("private", "host"))
        _at_least(self, "image", 0, "gpus", "shm_gib", "memory_gib", "cpus")
        _at_least(self, "image", 1, "replicas", "pids")


@dataclass
class TrafficConfig:
    """Which items (harness/traffic). limit, data and seed are those of the command line once resolved.

    max_new_tokens: a cap on what each item asks for. suffix, calibration_split: of gsm8k. None: the traffic's default.
    """

    name: str = ""
    data: str | None = None
    limit: int | None = None
    seed: int = 0
    max_new_tokens: int | None = None
    warmup: int = 16
    calibration: int = 32
    suffix: str | None = None
    calibration_split: str | None = None

    def __post_init__(self) -> None:
        _at_least(self, "traffic", 1, "limit", "max_new_tokens")
        _at_least(self, "traffic", 0, "warmup", "calibration")

    def options(self) -> dict[str, Any]:
        """What harness.traffic.load is asked for."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class TaskConfig:
    """What is done. warmup: items of the disjoint warm-up set. limit: of generated traffic, where the task has its own.

    concurrency: requests in flight (None: 1, or the gate's lists). seconds: no new item after that much measuring.
    Of bench: fixed_tokens: so many ids of every answer, ends ignored: equal work, and nothing to score. aa: the
    baseline's policy a second time, as an arm of its own. block: items of a block at concurrency > 1 (None: four times
    the concurrency). Of the gate: baseline: what B = 0 is compared with. chunk, control. mix_sampled: sampled requests
    between the compared ones, as a share of them. repeat: every prompt twice in a row, the prefix cache on. quantile,
    items: of calibrate.
    """

    name: str = ""
    warmup: int = 2
    limit: int | None = None
    concurrency: int | None = None
    seconds: float | None = None
    fixed_tokens: int | None = None
    aa: bool = False
    block: int | None = None
    baseline: str = "strict"
    chunk: int = 64
    control: int = 32
    mix_sampled: float = 0.0
    repeat: bool = False
    quantile: float = 0.25
    items: int = 32

    def __post_init__(self) -> None:
        _at_least(self, "task", 0, "warmup")
        _at_least(self, "task", 1, "limit", "concurrency", "fixed_tokens", "block", "chunk", "control", "items")
        _one_of("task", "baseline", self.baseline, ("strict", UNARMED))
        if not 0 < self.quantile < 1:
            raise ConfigError(f"task.quantile: expected a number between 0 and 1, found {self.quantile!r}")
        if not 0 <= self.mix_sampled <= 1:
            raise ConfigError(f"task.mix_sampled: expected a share from 0 to 1, found {self.mix_sampled!r}")
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"task.seconds: expected seconds > 0, found {self.seconds!r}")


@dataclass
class VerdictConfig:
    """What is a pass, arm by arm, by interval against threshold. Changes are fractions: 0.05 is 5 %. None: not judged.

    tps_gain: smallest change of tokens/s of a policy that may change ids. tps_cost: smallest change of one that may
    not (strict, B = 0): -0.01 is a cost of at most 1 %. accuracy_drop: largest, in percentage points. length_change:
    largest |change| of output tokens. drift: largest |change| of the baseline around a block, beyond which the block is
    left out. loops: largest share of items that may loop beyond the baseline's. alpha: of all comparisons together.
    """

    name: str = ""
    tps_gain: float | None = None
    tps_cost: float | None = None
    accuracy_drop: float | None = None
    length_change: float | None = None
    drift: float = 0.03
    loops: float = 0.02
    alpha: float = 0.05

    def __post_init__(self) -> None:
        _at_least(self, "verdict", 0, "accuracy_drop", "length_change", "drift", "loops")
        if not 0 < self.alpha < 1:
            raise ConfigError(f"verdict.alpha: expected a number between 0 and 1, found {self.alpha!r}")


@dataclass
class ReplayConfig:
    """What task=replay makes of a capture. policy: key of the policy whose blocks are read (None: strict, else chain,
    else the only one). policies: names of those to replay (None: all of recipes/policy). asd_budgets, asd_gates,
    asd_caps: a grid of ASD policies beside them, with the normalized suffix; empty: none. times: folders of bench runs
    that the step-time curve is measured in. live: of bench runs that predictions are checked against (None: times).
    costs: of bench runs on other prompts that a rule's own step is measured in (empty: halves of the live runs).
    shared: replay only the requests whose prompt all runs of times and live asked: of a capture of mixed traffic those
    that a run of one kind can be held against. parquet: write the scalars as Parquet beside the shards.
    """

    policy: str | None = None
    policies: list[str] | None = None
    asd_budgets: list[float] = field(default_factory=lambda: [1.0, 2.0, 4.0, 8.0])
    asd_gates: list[float] = field(default_factory=lambda: [0.25, 2.0])
    asd_caps: list[int] = field(default_factory=lambda: [1, 2])
    times: list[str] = field(default_factory=list)
    live: list[str] | None = None
    costs: list[str] = field(default_factory=list)
    shared: bool = False
    parquet: bool = True


KINDS: dict[str, type] = {
    "model": ModelConfig,
    "policy": PolicyConfig,
    "engine": EngineConfig,
    "launch": LaunchConfig,
    "image": ImageConfig,
    "traffic": TrafficConfig,
    "task": TaskConfig,
    "verdict": VerdictConfig,
}
GROUPS = tuple(KINDS)
EXPERIMENT = "experiment"  # a group without a dataclass of its own: members and fields of the others


@dataclass
class Config:
    """One run. `policy_source` says where the policy's numbers came from; it is filled in by `load`.

    arms: policies of a bench by name, the first is the baseline; None: strict, asd-b0 and the policy.
    resume: an unfinished run of this plan is continued if it was `stopped` (or killed); `failed`: also if it failed;
    `never`.
    sweep: the point this run is of one (harness/sweep.py); not asked for by name.
    capture: of task=replay, the folder of what an engine captured.
    run, why: of task=rejudge, the folder of the run that is judged again, and the reason.
    """

    model: ModelConfig = field(default_factory=lambda: ModelConfig(target="-", draft="-"))
    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(rule="strict"))
    engine: EngineConfig = field(default_factory=EngineConfig)
    launch: LaunchConfig = field(default_factory=lambda: LaunchConfig(name="process"))
    image: ImageConfig = field(default_factory=lambda: ImageConfig(name="auto"))
    traffic: TrafficConfig = field(default_factory=TrafficConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    verdict: VerdictConfig = field(default_factory=lambda: VerdictConfig(name="default"))
    arms: list[str] | None = None
    url: str | None = None
    data: str | None = None
    limit: int | None = None
    out: str | None = None
    seed: int = 980406
    resume: str = "stopped"
    policy_source: str = "recipe"
    sweep: dict[str, Any] | None = None
    capture: str | None = None
    run: str | None = None
    why: str | None = None
    replay: ReplayConfig = field(default_factory=ReplayConfig)

    def __post_init__(self) -> None:
        if bool(self.capture) != (self.task.name == "replay"):
            found = repr(self.capture) if self.capture else "nothing"
            raise ConfigError(f"capture: task=replay expects capture=FOLDER, and no other task, found {found}")
        for name, words in (("run", "FOLDER"), ("why", "the reason")):
            value = getattr(self, name)
            if bool(value and value.strip()) != (self.task.name == "rejudge"):
                found = repr(value) if value else "nothing"
                raise ConfigError(f"{name}: task=rejudge expects {name}={words}, and no other task, found {found}")
        if self.resume not in ("stopped", "failed", "never"):
            raise ConfigError(f"resume: expected stopped, failed or never, found {self.resume!r}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit: expected an integer >= 1, found {self.limit}")
        if self.launch.name == "attach" and not self.url:
            raise ConfigError("url: launch=attach expects url=http://host:port, found nothing")
        if self.launch.name != "attach" and self.url:
            raise ConfigError(f"url: belongs to launch=attach, found it with launch={self.launch.name}")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url: expected http://host:port, found {self.url!r}")

    @property
    def results(self) -> Path:
        return (Path(self.out) if self.out else ROOT / "results").expanduser().resolve()

    def resolved(self) -> dict[str, Any]:
        """What the record keeps: plain JSON, without the place where the record lies."""
        value = asdict(self)
        for name in ("out", "data", "limit", "resume", "sweep", "capture", "run", "why", "replay"):
            del value[name]
        if self.traffic.data:  # the folder's content is in the data set's provenance; where it lay says nothing
            value["traffic"]["data"] = Path(self.traffic.data).name
        return plain(value)


def plain(value: Any) -> Any:
    """JSON has no infinity: null stands for it, as in a policy's JSON."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def choices(group: str) -> list[str]:
    """Members of a group, as recipes/ has them."""
    return sorted(path.stem for path in (RECIPES / group).glob("*.yaml"))


@lru_cache(maxsize=64)
def _read(group: str, name: str) -> Any:
    return OmegaConf.load(RECIPES / group / f"{name}.yaml")


@lru_cache(maxsize=64)
def _member(group: str, name: str) -> Any:
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(KINDS[group]), _read(group, name)))


def member(group: str, name: str) -> Any:
    """One member of a group as its dataclass, without the rest of a configuration."""
    return deepcopy(_member(group, name))


def load(overrides: Sequence[str] = ()) -> Config:
    """Compose recipes/config.yaml with Hydra overrides, check it, and settle what depends on several groups."""
    overrides = [_verbatim(text) for text in overrides]
    named = _check_names(overrides)
    config = _compose(overrides)
    if config.launch.name == "docker":
        settle_image(config, named)
    if config.launch.code == "container" and config.image.name == "auto":
        raise ConfigError("launch.code: container needs image=NAME, whose Python runs the answers, found image=auto")
    if "model.dtype" in named:
        config.model.dtypes = {}
    settle_policy(config, named)
    _check_own(config, named)
    _check_replicas(config)
    _check_fixed(config.policy)
    _check_arms(config, named)
    traffic = config.traffic
    if (config.data or traffic.data) and traffic.name not in READS_DATA:
        raise ConfigError(f"data: belongs to traffic={' or '.join(READS_DATA)}, found it with traffic={traffic.name}")
    traffic.data = str(Path(config.data).expanduser().resolve()) if config.data else traffic.data
    own = traffic.limit and config.task.limit  # a data set without a limit of its own is used whole
    traffic.limit = config.limit or own or traffic.limit
    traffic.seed = config.seed
    return config


def _verbatim(text: str) -> str:
    """`data=/a b/c=d` as a quoted Hydra value; `task=tables_check` as the name it stands for."""
    key, sign, value = text.partition("=")
    if key == "task":
        return f"task={value.replace('_', '-')}" if sign else text
    if sign and key in VERBATIM and value not in ("", "null") and value[0] not in "'\"":
        escaped = value.replace("\\", "\\\\") if value.endswith("\\") else value
        return f"{key}='" + escaped.replace("'", "\\'") + "'"
    return text


def hydra_override(text: str) -> str:
    """An override of the command line as Hydra's own command line takes it: a field need not stand in its YAML."""
    text = _verbatim(text)
    return text if _is_known(text) else f"++{text}"


def _check_names(overrides: Sequence[str]) -> set[str]:
    """The keys that are overridden; an unknown key or group member is an error with the choices.

    A member's name is what rows are filed under: it is chosen with GROUP=MEMBER and never given to something else.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(f"{_first_line(error)} (expected NAME=VALUE, see --help)") from None
    top = {item.name for item in fields(Config)} - {"policy_source", "sweep"} | {EXPERIMENT}
    for override in parsed:
        key = override.key_or_group
        if key.partition(".")[0] not in top or override.package is not None:
            raise ConfigError(f"unknown override {key!r}, expected one of {', '.join(sorted(top))}")
        if key in {f"{group}.name" for group in GROUPS}:
            group = key.partition(".")[0]
            raise ConfigError(f"{key}: a member keeps its name, expected {group}={'|'.join(choices(group))}")
        if key in (*GROUPS, EXPERIMENT):
            member = override.value()
            if member not in choices(key):
                raise ConfigError(f"{key}: expected one of {', '.join(choices(key))}, found {str(member)!r}")
    return {override.key_or_group for override in parsed}


def _compose(overrides: Sequence[str]) -> Config:
    try:
        with initialize_config_dir(str(RECIPES), version_base="1.3"):
            composed = compose("config", [text if _is_known(text) else f"++{text}" for text in overrides])
        # Members name only what differs from their dataclass: the merge types and fills them.
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), composed))  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(f"{key}: {_first_line(error)}" if key else _first_line(error)) from None


def _is_known(text: str) -> bool:
    """Top-level names stand in config.yaml; a field such as task.chunk need not stand in its member's YAML."""
    return "." not in text.partition("=")[0] or text.startswith(("+", "~"))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason"])[0]


def settle_policy(config: Config, named: Collection[str] = ()) -> None:
    """A model's own numbers replace a recipe's, and the command line replaces both."""
    replaced: dict[str, Any] = dict(config.model.policies.get(config.policy.name, {}))
    source = f"model {config.model.name}" if replaced else "recipe"
    if config.policy.calibrated and config.model.calibration and (path := rooted(config.model.calibration)).exists():
        replaced |= read_calibration(path)
        source = f"calibration {config.model.calibration}"
    kept = {key.partition(".")[2] for key in named if key.startswith("policy.")}
    if unknown := sorted(set(replaced) - {item.name for item in fields(PolicyConfig) if item.name != "name"}):
        raise ConfigError(f"model.policies.{config.policy.name}: unknown field {unknown[0]!r}")
    for name, value in replaced.items():
        if name not in kept:
            setattr(config.policy, name, value)
    config.policy.__post_init__()
    config.policy_source = source + (f", {', '.join(sorted(kept))} from the command line" if kept else "")


def _check_own(config: Config, named: Collection[str]) -> None:
    """A field of one task, given to another, would be ignored."""
    for task, names in OWN.items():
        if config.task.name not in (task, "sweep") and (
            given := sorted({f"task.{name}" for name in names} & set(named))
        ):
            raise ConfigError(f"{given[0]}: belongs to task={task}, found it with task={config.task.name}")


def _check_replicas(config: Config) -> None:
    """Server processes that share a GPU take turns item by item, one request at a time: a bench's order."""
    if config.launch.name != "process" or (config.launch.replicas or 1) == 1:
        return
    if config.task.name not in ("bench", "sweep"):
        raise ConfigError(f"launch.replicas: with launch=process of a bench, found task={config.task.name}")
    if (config.task.concurrency or 1) > 1:
        found = config.task.concurrency
        raise ConfigError(f"launch.replicas: with launch=process expected task.concurrency=1, found {found}")


def _check_fixed(found: PolicyConfig) -> None:
    """Two arms under one name would be one row: a policy with the name of a fixed arm is that arm."""
    if found.name in FIXED_ARMS and found.policy != (own := member("policy", found.name).policy):
        raise ConfigError(
            f"policy: {found.name} is an arm of its own, expected {own.key}, found {found.policy.key}: "
            "change another policy, as in policy=asd policy.budget=4"
        )


def _check_arms(config: Config, named: Collection[str]) -> None:
    """Names that are arms, once each, and all of them something this run can have."""
    arms = config.arms
    unarmed = UNARMED in (arms or ()) or (config.task.name == "gate" and config.task.baseline == UNARMED)
    if unarmed:
        if config.engine.unarmed_why:
            raise ConfigError(f"arms: {UNARMED}: {config.engine.unarmed_why}")
        if config.launch.name != "process":
            raise ConfigError(f"arms: {UNARMED} is a server of its own: expected launch=process")
    if arms is None:
        return
    if config.task.name in ("gate", "calibrate"):
        raise ConfigError(f"arms: of a bench, found task={config.task.name} (a gate has task.baseline)")
    known = (*choices("policy"), UNARMED)
    if unknown := [name for name in arms if name not in known]:
        raise ConfigError(f"arms: expected some of {', '.join(known)}, found {unknown[0]!r}")
    if len(set(arms)) != len(arms) or len(arms) < 2 or set(arms) == {UNARMED}:
        raise ConfigError(f"arms: expected two or more, each once (task.aa=true repeats the baseline), found {arms}")
    if config.policy.name not in arms and any(key.partition(".")[0] == "policy" for key in named):
        raise ConfigError(f"arms: expected policy={config.policy.name} among them, found {', '.join(arms)}")
    temperatures = {name: arm_policy(config, name)[0].temperature for name in arms if name != UNARMED}
    if len(set(temperatures.values())) > 1:
        told = ", ".join(f"{name} {value:g}" for name, value in temperatures.items())
        raise ConfigError(f"arms: expected policies of one temperature, found {told}")


def arm_policy(config: Config, name: str) -> tuple[PolicyConfig, str]:
    """The policy of an arm, settled for the model, and where its numbers came from. chain takes the policy's
    temperature: it is what a sampled policy is compared with."""
    if name == config.policy.name:
        return config.policy, config.policy_source
    found = replace(config, policy=member("policy", name))
    settle_policy(found)
    if name == "chain" and config.policy.temperature > 0:
        return replace(found.policy, temperature=config.policy.temperature), "recipe"
    return found.policy, found.policy_source


def settle_image(config: Config, named: Collection[str] = ()) -> None:
    """launch=docker: the image for the model and the engine, and the engine for the image where none was asked for."""
    model, asked = config.model.name, "engine" in named
    if config.image.name == "auto":
        fits = [each for each in (member("image", name) for name in choices("image")) if model in each.models]
        fits = [each for each in fits if not asked or each.engine == config.engine.name]
        fits.sort(key=lambda each: bool(each.cards))  # one that runs on any card first
        if not fits:
            raise ConfigError(f"image: none for {model}" + (f" on {config.engine.name}" if asked else ""))
        config.image = _with_overrides("image", fits[0], config.image, named)
        config.launch.replicas = config.launch.replicas or 1
    config.launch.replicas = config.launch.replicas or config.image.replicas
    if asked and config.image.engine != config.engine.name:
        raise ConfigError(f"engine: image {config.image.name} has {config.image.engine}, found {config.engine.name!r}")
    if config.engine.name != config.image.engine:
        config.engine = _with_overrides("engine", member("engine", config.image.engine), config.engine, named)


def _with_overrides(group: str, found: Any, composed: Any, named: Collection[str]) -> Any:
    """A member that was chosen after composing, with what the command line said of the one composed."""
    given = {}
    for name in {key.split(".")[1] for key in named if key.startswith(f"{group}.")}:
        value = getattr(composed, name)
        given[name] = getattr(found, name) | value if isinstance(value, dict) else value
    return replace(found, **given)


def read_calibration(path: Path) -> dict[str, Any]:
    """The policy fields a calibration file froze."""
    try:
        policy = Policy.from_json(json.loads(path.read_text())["policy"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{type(error).__name__}: {_first_line(error)}"  # its repr would quote a whole file that is not text
        raise ConfigError(f"calibration {path.name}: expected a JSON object with a policy, found {what}") from None
    return asdict(policy)


def rooted(path: str) -> Path:
    """A path of a recipe: relative ones start at this checkout."""
    return path_ if (path_ := Path(path).expanduser()).is_absolute() else ROOT / path_
