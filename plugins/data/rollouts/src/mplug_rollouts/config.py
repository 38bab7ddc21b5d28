"""The config of the loader. Imports no torch."""

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from mplug import MAY_CHANGE, MAY_MOVE, distinct

Scale = Literal["group", "batch", "none"]


def _address(value: str) -> str:
    found = urlsplit(value)
    if found.scheme not in ("http", "https") or not found.hostname or found.query or found.fragment:
        raise ValueError(f"'{value}' is no address of a server; give one such as http://127.0.0.1:8000")
    if found.username is not None or found.password is not None:
        raise ValueError("an address has no user and password; name the variable with a key in `key_variable`")
    return value.rstrip("/")


class ServerConfig(BaseModel):
    """The server that completes prompts, and how it gets new weights."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    addresses: Annotated[list[Annotated[str, AfterValidator(_address)]], AfterValidator(distinct), MAY_CHANGE] = Field(
        default_factory=list,
        description="http://HOST:PORT of each copy of the server, without /v1; each gets its part of the prompts",
    )
    model: Annotated[str | None, MAY_CHANGE] = Field(None, description="the name of the model; null: the server's own")
    key_variable: Annotated[str | None, MAY_CHANGE] = Field(
        None, description="the environment variable that has the server's key; null: no key"
    )
    seconds: Annotated[PositiveFloat, MAY_CHANGE] = Field(600.0, description="a request that takes longer is repeated")
    retries: Annotated[int, MAY_CHANGE] = Field(5, ge=0, description="how often a request is repeated when it fails")
    connections: Annotated[PositiveInt, MAY_CHANGE] = Field(32, description="requests at a time to each address")
    weights: Literal["stale", "checkpoints"] = Field(
        "stale",
        description="stale: the server keeps the weights with which the run begins; checkpoints: each checkpoint is "
        "exported to the folder 'served' of the run, and the server is asked to load it (`reload`)",
    )
    reload: str = Field(
        "/update_weights_from_disk",
        pattern="^/",
        description="the path of the request that loads a folder, with the body {'model_path': FOLDER}, as in SGLang",
    )
    format: str = Field("huggingface", description="the installed format of the exports")


class RolloutsConfig(BaseModel):
    """The prompts, how the model completes them, what rewards completions, and how samples are made."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[str, MAY_MOVE] = Field(
        min_length=1,
        description="a file *.jsonl or *.jsonl.gz, a folder of such files, or a glob; a line has a prompt",
    )
    validation_path: Annotated[str | None, MAY_MOVE] = Field(
        None,
        min_length=1,
        description="files of prompts for validation, given like `path`; null: validation_percent of `path`",
    )
    validation_percent: Annotated[float, MAY_MOVE] = Field(
        5, gt=0, le=50, description="percentage of the prompts for validation, by a hash of them"
    )
    completions: Literal["sampled", "served", "given"] = Field(
        "sampled",
        description="sampled: the model that trains completes the prompts; served: a server does (`server`); given: "
        "each line has completions with rewards, as `save` writes them",
    )
    server: ServerConfig = Field(
        default_factory=ServerConfig, description="the server of served completions, in the form of OpenAI"
    )
    rewards: Annotated[list[str], AfterValidator(distinct)] = Field(
        default_factory=list,
        description="functions that reward completions, as in TRL: module:function, of a module that Python finds or "
        "of the current folder; file.py:function; or the name of an entry point of the group mplug.rewards",
    )
    reward_weights: list[float] | None = Field(None, description="factors on the rewards of the functions; null: 1")
    reward_seconds: Annotated[PositiveFloat, MAY_CHANGE] = Field(
        60.0, description="a function that needs more seconds for the completions of a prompt is ended"
    )
    reward_processes: Annotated[PositiveInt, MAY_CHANGE] = Field(
        1, description="number of processes in which the functions run, of each group of ranks with the same samples"
    )
    num_generations: int = Field(8, ge=2, description="completions of a prompt, which are compared with one another")
    prompts_per_rollout: PositiveInt | None = Field(
        None,
        description="prompts that the model completes at a time, for one or several steps; null: those of one step",
    )
    repeats: PositiveInt = Field(1, description="number of times that the completions of a rollout are trained on")
    max_tokens: PositiveInt = Field(128, description="largest number of tokens of a completion")
    temperature: PositiveFloat = Field(1.0, description="divides the logits when tokens are sampled")
    lanes: Annotated[PositiveInt, MAY_CHANGE] = Field(
        64, description="largest number of completions that a group of ranks samples at the same time"
    )
    cache_tokens: Annotated[PositiveInt | None, MAY_CHANGE] = Field(
        None,
        description="let the completions of a group of ranks share pages of a cache with room for this many tokens; "
        "null: room for trainer.seq_length / per_sample tokens in each lane",
    )
    graphs: Annotated[bool, MAY_CHANGE] = Field(
        False, description="replay the step of a token as a CUDA graph; runs on a GPU without exchanges inside a step"
    )
    gather: Annotated[Literal["rollout", "units"], MAY_CHANGE] = Field(
        "rollout",
        description="of weights that ranks store in parts (fsdp): rollout: gather all of them once for each rollout, "
        "which needs memory for the whole model; units: gather those of one unit after another for every token",
    )
    scores: Literal["auto", "sampler", "trainer"] = Field(
        "auto",
        description="whose log-probabilities sampled completions get: sampler: those of the steps that sampled the "
        "tokens; trainer: those of a forward pass of the micro batches of the steps, before these, which are equal to "
        "the steps' own bit by bit (not with trainer.compile=inductor); auto: trainer under trainer.deterministic if "
        "a rollout serves whole steps, and inductor compiles nothing",
    )
    scale: Scale = Field(
        "group",
        description="what divides a reward minus the mean of its prompt: the standard deviation of the prompt's "
        "rewards, of all rewards of the rollout, or nothing (as in Dr. GRPO)",
    )
    mask_truncated: bool = Field(False, description="completions that max_tokens cuts off have no target")
    per_sample: PositiveInt = Field(
        1, description="completions of a sample; each may have trainer.seq_length / per_sample tokens with its prompt"
    )
    save: Annotated[bool, MAY_CHANGE] = Field(
        False, description="write completions and rewards to rollouts.jsonl in the folder of the run"
    )
    log_probabilities: bool = Field(
        True, description="of given completions: read the log-probability with which each token was sampled"
    )
    tokenizer: str = Field("bytes", description="name of an installed tokenizer plugin")
    tokenizer_options: dict[str, Any] = Field(default_factory=dict, description="options of the tokenizer")
    template: str = Field(
        "chatml",
        description="of messages: chatml, llama3, a Jinja file, a JSON file with 'chat_template', or the folder of "
        "a published checkpoint; a run that begins with such a folder uses the folder's tokenizer and template",
    )
    template_variables: dict[str, str] = Field(
        default_factory=dict,
        description="variables of a template file in addition to the messages, such as bos_token: '<s>'",
    )
    special_tokens: Annotated[list[str], AfterValidator(distinct)] | None = Field(
        None,
        description="texts that are encoded as one token each; null: those of the built-in template, of the JSON "
        "file, or of template_variables",
    )

    @model_validator(mode="after")
    def _rewards_fit(self) -> Self:
        if self.completions != "given" and not self.rewards:
            raise ValueError(f"{self.completions} completions need rewards; set data.rewards=[module:function]")
        if (self.completions == "served") != bool(self.server.addresses):
            raise ValueError("data.completions=served and data.server.addresses belong together; set both or neither")
        for name in ("graphs", "cache_tokens"):
            if self.completions == "served" and getattr(self, name):
                raise ValueError(f"{name} is of the sampler of the run, and a server completes prompts; remove it")
        for name in ("scores", "gather"):
            if self.completions != "sampled" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is of the sampler of the run, and it samples no completions; remove it")
        if self.completions == "given" and self.rewards:
            raise ValueError("given completions have their rewards in the lines; remove data.rewards")
        for name in ("repeats", "prompts_per_rollout"):
            if self.completions == "given" and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect: the completions are given, not sampled; remove it")
        if self.completions == "given" and self.save:
            raise ValueError("save writes sampled completions, and these are given; remove it")
        if self.completions != "given" and not self.log_probabilities:
            raise ValueError("log_probabilities is of given completions; remove it")
        if self.reward_weights is not None and len(self.reward_weights) != len(self.rewards):
            raise ValueError(f"reward_weights has {len(self.reward_weights)} numbers for {len(self.rewards)} functions")
        return self
