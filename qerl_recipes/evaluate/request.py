"""Define the options of ``qerl evaluate`` once: for the command, its child processes and the evaluations of a study.

recipes/evaluation.md lists the tasks. This module imports neither torch nor vLLM nor lighteval: ``qerl --help`` needs
its options.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from typer import Argument, Option
from typer.models import ParameterInfo

from qerl_recipes.files.json_files import read_lines
from qerl_recipes.recipe.generation import template_text

LIGHTEVAL = {"gsm8k": "gsm8k", "math_500": "math_500", "aime24": "aime", "aime25": "aime"}  # task -> module
NAMES = (*LIGHTEVAL, "amc23", "running_sum")
MATH, ACCURACY, EXACT, NUMBER = "jsonl:", "jsonl-accuracy:", "jsonl-exact:", "jsonl-number:"
LOCAL = (MATH, ACCURACY, EXACT, NUMBER)
ENVIRONMENT, TOOLS = "environment:", "tools"
KNOWN = ", ".join((*NAMES, *(f"{kind}PATH" for kind in LOCAL), f"{ENVIRONMENT}NAME", TOOLS))
# fields of vLLM's SamplingParams that other options set, and fields on which reading an answer depends
FIXED = {
    *("n", "seed", "temperature", "top_p", "max_tokens"),
    *("logprobs", "flat_logprobs", "prompt_logprobs", "detokenize", "output_kind"),
}
DRAWN = ("top_k", "min_p")  # fields that vLLM drops for a greedy answer
DRAW = "set temperature (0.6, say), or leave this out"
JSON_OPTIONS = {
    "chat_template_kwargs": '{"enable_thinking": false}',
    "generation_kwargs": '{"stop": ["</answer>"]}',
    "response_template": '{"fields": {...}}',
}
OF_EPISODES = ("problems", "success_at", "response_template")  # options that no other task reads
ONE_OR_MORE, SHARE = Field(ge=1), Field(gt=0, le=1)


class Sampling(BaseModel):
    """Describe how problems are prompted and how answers are sampled.

    None leaves a choice open: the adapter's training settings fill it first, then each task or engine.
    ``generation_kwargs`` are further fields of vLLM's SamplingParams; {} sets none. Raises ValueError for an unknown
    option.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Annotated[
        float, Field(ge=0, allow_inf_nan=False), Option(help="Sampling temperature; 0 is greedy decoding.")
    ] = 0.0
    top_p: Annotated[float, SHARE, Option(help="Nucleus sampling, above temperature 0.")] = 1.0
    max_new_tokens: Annotated[
        int | None, ONE_OR_MORE, Option(help="Longest answer in tokens; default: as in training, else each task's own.")
    ] = None
    seed: Annotated[int | None, Option(help="Seed of sampling above temperature 0; default: 0.")] = None
    use_chat_template: Annotated[
        bool | None,
        Option("--use-chat-template/--no-chat-template", help="Use a chat template; default: if there is one."),
    ] = None
    system_prompt: Annotated[str | None, Option(help='Default: as in training; "" is none.')] = None
    chat_template: Annotated[
        str | None, Option(help="Jinja text or a file that replaces the tokenizer's template; default: as in training.")
    ] = None
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None, Option(help='JSON, such as {"enable_thinking": false}; default: as in training.')
    ] = None
    generation_kwargs: Annotated[
        Mapping[str, Any] | None,
        Option(help='JSON of SamplingParams, such as {"stop": ["</answer>"]}; default: as in training.'),
    ] = None

    @field_validator(*JSON_OPTIONS, mode="before", check_fields=False)
    @classmethod
    def _json_object(cls, value: Any, info: Any) -> Any:
        try:
            content = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            content = value
        if content is not None and not isinstance(content, Mapping):
            raise ValueError(f"it is no JSON object such as '{JSON_OPTIONS[info.field_name]}'")
        return content

    @property
    def drawn_with(self) -> int | None:
        return None if self.temperature == 0 else self.seed or 0

    def sampling(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Sampling.model_fields}


class Evaluation(Sampling):
    """Describe one evaluation, of ``base`` alone and, if given, with ``adapter``, which get the same prompts.

    None takes the setting from the adapter's training, if its folder records one. Without an adapter the defaults are
    qerl_nvfp4, bfloat16, the tokenizer's template, no system prompt and each task's own length.
    """

    base: Annotated[str, Argument(help="NVFP4 or BF16 checkpoint: a folder or a model id.")]
    tasks: Annotated[list[str], Option(help=f"Tasks, comma-separated: {KNOWN}.")]
    output_dir: Annotated[Path, Option(help="Folder for evaluation.json and answers.jsonl.")]
    adapter: Annotated[Path | None, Option(help="Folder of a trained adapter, or of the run that trained it.")] = None
    quantization: Annotated[
        str | None, Option(help="qerl_nvfp4, bf16 or nf4; default: what the adapter was trained on.")
    ] = None
    dtype: Annotated[str | None, Option(help="bfloat16, float16 or float32; default: as in training.")] = None
    max_model_length: Annotated[
        int | None, ONE_OR_MORE, Option(help="Most tokens of prompt and answer; default: the model's.")
    ] = None
    tensor_parallel_size: Annotated[int, ONE_OR_MORE, Option(help="GPUs that hold the model together.")] = 1
    num_samples: Annotated[int, ONE_OR_MORE, Option(help="Answers to each problem.")] = 1
    max_samples: Annotated[int | None, ONE_OR_MORE, Option(help="Problems of each task; default: all.")] = None
    gpu_memory_utilization: Annotated[float, SHARE, Option(help="Share of the GPU's memory for vLLM.")] = 0.9
    kv_cache_memory_bytes: Annotated[
        int | None, ONE_OR_MORE, Option(help="Size of vLLM's KV cache, unmeasured: for several engines on one GPU.")
    ] = None
    problems: Annotated[
        Path | None,
        Option(help="JSON lines for environment:NAME and tools; default: what the run held out, or the environment's."),
    ] = None
    success_at: Annotated[
        float | None,
        Field(allow_inf_nan=False),
        Option(help="Reward from which an episode is a success; default: 1. For environment:NAME, tools."),
    ] = None
    response_template: Annotated[
        Mapping[str, Any] | None,
        Option(help="JSON that finds tool calls, for environment:NAME and tools; default: as in training."),
    ] = None
    adapter_only: Annotated[bool, Option(help="Leave the base out, where it was judged before.")] = False
    noise_sigma: Annotated[
        float, Field(ge=0, allow_inf_nan=False), Option(help="Noise on the norms, as in rollouts; 0 is none.")
    ] = 0.0
    noise_seed: Annotated[int | None, Option(help="Seed of that noise; default: 0.")] = None
    quiet: bool = False  # prints warnings alone; the command has no such option

    @field_validator("tasks", mode="before")
    @classmethod
    def _as_list(cls, tasks: Any) -> Any:
        return [name.strip() for name in tasks.split(",")] if isinstance(tasks, str) else tasks

    @property
    def episodes(self) -> list[str]:
        return [name for name in self.tasks if has_episodes(name)]

    @property
    def least_reward(self) -> float:
        return 1.0 if self.success_at is None else self.success_at

    @classmethod
    def of(cls, **options: Any) -> "Evaluation":
        """Return the evaluation with these options; raise ValueError in plain words, naming each unusable option."""
        try:
            return cls(**options)
        except ValidationError as error:
            lines = []
            for one in error.errors():
                reason = one["msg"].removeprefix("Value error, ").replace("Input should", "it must")
                given = "" if one["type"] in ("missing", "extra_forbidden") else f" is {one['input']!r};"
                lines.append(f"{'.'.join(map(str, one['loc']))}{given or ':'} {reason}")
            raise ValueError("; ".join(lines)) from error

    def checked(self) -> "Evaluation":
        """Return this evaluation with its template's text; raise ValueError for options that would be ignored."""
        check_tasks(self.tasks)
        template = None if self.chat_template is None else template_text(self.chat_template)
        is_greedy, has_no_template = self.temperature == 0, self.use_chat_template is False
        fixed = sorted(FIXED & (self.generation_kwargs or {}).keys())
        drawing = {"top_p": self.top_p} if self.top_p < 1 else {}
        drawing |= {name: value for name, value in (self.generation_kwargs or {}).items() if name in DRAWN and value}
        drawing |= {"seed": self.seed} if self.seed is not None and not self.episodes else {}
        of_template = [name for name in ("chat_template", "chat_template_kwargs") if getattr(self, name)]
        of_episodes = [name for name in OF_EPISODES if getattr(self, name) is not None]
        if is_greedy and self.num_samples > 1:
            raise ValueError(
                f"num_samples is {self.num_samples}, but temperature 0 gives the same answer each time; {DRAW}"
            )
        for name in drawing if is_greedy else ():
            raise ValueError(f"{name} is {drawing[name]}, but temperature 0 (greedy) draws nothing; {DRAW}")
        if fixed:
            raise ValueError(
                f"generation_kwargs cannot set {', '.join(fixed)}: temperature, top_p, seed, num_samples and "
                "max_new_tokens are options of their own, and answers are judged as texts; remove it"
            )
        if has_no_template and of_template:
            raise ValueError(
                f"{', '.join(of_template)} would be ignored: no chat template is used (use_chat_template is false, "
                "which is --no-chat-template); remove one of the two"
            )
        if of_episodes and not self.episodes:
            raise ValueError(f"{', '.join(of_episodes)} would be ignored: no task is {ENVIRONMENT}NAME or {TOOLS}")
        if has_no_template and self.episodes:
            raise ValueError(f"{self.episodes[0]} needs a chat template, which renders calls; drop --no-chat-template")
        if self.noise_seed is not None and not self.noise_sigma:
            raise ValueError(f"noise_seed is {self.noise_seed}, but there is no noise; set noise_sigma too")
        if self.problems is not None and not self.problems.is_file():
            raise ValueError(f"problems: there is no file {self.problems}")
        if self.adapter is None and TOOLS in self.tasks:
            raise ValueError(f"task {TOOLS} takes the tools of a run; name it with --adapter")
        if self.adapter is None and self.adapter_only:
            raise ValueError("adapter_only leaves the base out, and there is no adapter; name one with --adapter")
        return self.model_copy(update={"chat_template": template})


def command_signature() -> inspect.Signature:
    """Return the signature of ``qerl evaluate`` for typer: the fields of ``Evaluation`` that have a help text."""
    parameters = []
    # The options of sampling, which the base class has, come last in the help.
    for name, field in sorted(Evaluation.model_fields.items(), key=lambda item: item[0] in Sampling.model_fields):
        if option := next((one for one in field.metadata if isinstance(one, ParameterInfo)), None):
            kind = str if name == "tasks" else str | None if name in JSON_OPTIONS else field.annotation
            annotation: Any = Annotated[kind, option]  # type: ignore[valid-type]
            default = inspect.Parameter.empty if field.is_required() else field.default
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
    return inspect.Signature(parameters)


def check_tasks(names: Sequence[str], *, may_act: bool = True) -> None:
    """Raise ValueError for a task that is unknown, named twice or unreadable."""
    if not names:
        raise ValueError(f"name at least one task: {KNOWN}")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"task {name} is named twice")
        if name.startswith(LOCAL):
            read_problems(Path(name.partition(":")[2]))
        elif name not in NAMES and not has_episodes(name):
            raise ValueError(f"there is no task {name!r}; choose from {KNOWN}")
        if has_episodes(name) and not may_act:
            raise ValueError(
                f"task {name} takes tools, limits and rewards from the adapter's run, which a merged checkpoint has "
                f"not; name a task without episodes: {', '.join((*NAMES, *LOCAL))}"
            )


def has_episodes(task: str) -> bool:
    """Return True for a task in which the policy acts, over several turns."""
    return task == TOOLS or (task.startswith(ENVIRONMENT) and task != ENVIRONMENT)


class _AsWritten(str):
    """Keep the text of a JSON number with a point or an exponent, exactly as written."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key stands there twice")
    return row


def read_problems(path: Path) -> list[dict[str, str]]:
    """Read a local file as rows with the texts "prompt" and "answer"; raise ValueError for any other form."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}; a local task is written jsonl:PATH")
    form, rows = '{"prompt": TEXT, "answer": TEXT}', []
    for place, row in read_lines(path, form, parse_float=_AsWritten, object_pairs_hook=_once):
        if missing := {"prompt", "answer"} - row.keys():
            raise ValueError(f"{place}: each line must be {form}; it has no {' and no '.join(sorted(missing))}")
        prompt, answer = row["prompt"], row["answer"]
        has_answer = isinstance(answer, str | int) and not isinstance(answer, bool) and str(answer).strip()
        if not isinstance(prompt, str) or isinstance(prompt, _AsWritten) or not prompt.strip() or not has_answer:
            raise ValueError(f"{place}: prompt must be a text, and answer a text or a number, none of them empty")
        rows.append({"prompt": prompt, "answer": str(answer)})
    if not rows:
        raise ValueError(f"{path} holds no problems")
    return rows
