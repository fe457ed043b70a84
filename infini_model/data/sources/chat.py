"""The form of a conversation, by default a tokenizer's own `chat_template`.

A `chat_template` is Hugging Face's: a program in Jinja, which is rendered as `transformers` renders
it, in Jinja's sandbox and without the date, so that the same messages always give the same text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from infini_model.runtime.errors import DataError

USER, ASSISTANT = "user", "assistant"
# The form of a tokenizer that states none.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:\n{{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
# Stands for an answer whose surroundings are looked for. No template changes a word.
MARK = "a8f1b0c5d3e94726"
ANSWERED = [{"role": USER, "content": "."}, {"role": ASSISTANT, "content": MARK}]
ADVICE = "; data.source.learn=last learns the last answer alone"

# Errors of a template as it runs, besides Jinja's own, such as a division by zero.
PROGRAM_ERRORS = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError

Message = dict[str, Any]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChatTemplate:
    """The form in which messages become text.

    Attributes:
        source: The program.
        tokens: What the program knows by name, such as `eos_token`.
        begin: The text of the token that begins every document, which is not part of the rendered
            text; empty if none does.
        end: That of the token that ends every document.
    """

    source: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    begin: str = ""
    end: str = ""

    def render(self, messages: Messages, *, asks: bool = True, tools: Any = None) -> str:
        """The text of messages; `asks` adds what comes before the assistant's next answer.

        `tools` are those that the assistant may call, as `transformers` takes them. Raises
        `DataError` with the program's own words if it refuses the messages.
        """
        from jinja2 import TemplateError

        known = dict(self.tokens) | {"tools": tools, "documents": None}
        try:
            text = _compiled(self.source).render(
                messages=list(messages), add_generation_prompt=asks, **known
            )
        except (TemplateError, *PROGRAM_ERRORS) as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error
        return str(text).removeprefix(self.begin)

    def pieces(
        self, messages: Messages, learn: Literal["all", "last"] = "all", tools: Any = None
    ) -> list[str]:
        """A conversation in turn: what the model is given, and what it learns to say.

        `messages` end with one of the assistant; `learn` says whether all of its messages are
        learned. A token that closes an answer belongs to it, unless it is the one that ends the
        document.

        Raises `DataError` as `render`, and where an answer cannot be told from what is around it:
        what comes before an answer must stay the same whatever follows.
        """
        whole, pieces, done = self.render(messages, asks=False, tools=tools), list[str](), 0
        turns = [turn for turn, each in enumerate(messages) if each["role"] == ASSISTANT]
        for turn in turns if learn == "all" else turns[-1:]:
            first, last = self._bounds(whole, messages[: turn + 1], turns[-1] == turn, tools)
            if first < done:
                raise DataError(
                    f"the chat template closes an earlier answer differently from the last{ADVICE}"
                )
            pieces += [whole[done:first], whole[first:last]]
            done = last
        return [*pieces[:-1], pieces[-1].removesuffix(self.end)]

    def _bounds(self, whole: str, messages: Messages, is_last: bool, tools: Any) -> tuple[int, int]:
        """The place in `whole` of the answer that `messages` end with: its start and its end."""
        *before, answer = messages
        prompts = (self.render(before, asks=asks, tools=tools) for asks in (True, False))
        prompt = next(filter(whole.startswith, prompts), None)
        if prompt is None:
            advice = "" if is_last else ADVICE
            raise DataError(f"the chat template changes the prompt once there is an answer{advice}")
        text, said = whole.removeprefix(prompt), answer["content"]
        said = said if said in text else said.strip()
        # An answer that the template changes is not found.
        opening, said, rest = text.partition(said) if said and said in text else ("", "", text)
        before_close, close, _ = rest.partition(self.closing) if self.closing else ("", "", "")
        closing = rest.rstrip() if is_last else before_close + close
        asked = before[-1]["content"].strip() if before else ""
        if closing.strip() and f"{prompt}{opening}".rstrip().endswith(f"{asked}{closing}"):
            raise DataError(
                f"the chat template puts {closing.strip()!r} after a prompt and after an answer "
                "alike, so the end of an answer cannot be found"
            )
        return len(prompt), len(prompt) + len(opening) + len(said) + len(closing)

    def next_turn(self, messages: Messages) -> str:
        """The text between an answer of the assistant and its next one, which `messages` separate.

        It begins with what closes an answer. Raises `DataError` as `render`, and if the form does
        not show answers verbatim.
        """
        text = self.render([*ANSWERED, *messages])
        if text.count(MARK) != 1:
            raise DataError("the chat template does not show earlier answers as they were given")
        return text.partition(MARK)[2]

    @functools.cached_property
    def closing(self) -> str:
        """The text that closes an answer, stripped. Raises `DataError` as `render`."""
        return self.render(ANSWERED, asks=False).rpartition(MARK)[2].strip()


@functools.lru_cache(8)
def _compiled(source: str) -> Any:
    """The program, compiled as `transformers` does. Raises `DataError` if it is none."""
    from jinja2 import TemplateError, TemplateSyntaxError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `generation`, which marks what an assistant says."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise DataError(f"the chat template is not valid: line {error.lineno}: {error}") from error
