"""Conversations to prompts, through the chat template of the model's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import attrs

from ..contract import ConfigError
from ..inputs import TokensPrompt
from .images import TEXT_ONLY, is_image
from .media import MediaPolicy
from .prompts import tokenizing

ContentFormat = Literal["auto", "string", "openai"]

#: Types of content parts that are text, and the key that holds it.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}

#: Types of content parts that are images, and the key that holds a URL or a PIL image.
IMAGE_PARTS = {
    "image_url": "image_url",
    "input_image": "image_url",
    "image_pil": "image_pil",
    "image": "image",
}

#: What :class:`ChatOptions` or core itself tells ``apply_chat_template``; all else is the template's.
_TAKEN = (
    "chat_template", "tools", "add_generation_prompt", "continue_final_message",
    "conversation", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip


@attrs.frozen(kw_only=True)
class ChatOptions:
    """How conversations become prompts; the names are those of ``LLM.chat``."""

    chat_template: str | None = None  #: Jinja text; None: the tokenizer's own
    content_format: ContentFormat = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Any] | None = None
    template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        faults = []
        if self.content_format not in get_args(ContentFormat):
            faults.append(
                f"chat_template_content_format must be one of {', '.join(get_args(ContentFormat))}, "
                f"got {self.content_format!r}"
            )
        if self.add_generation_prompt and self.continue_final_message:
            faults.append(
                "add_generation_prompt=True begins a new message and continue_final_message=True goes on "
                "with the last one: set add_generation_prompt=False"
            )
        if self.tools is not None and (isinstance(self.tools, str) or not isinstance(self.tools, Sequence)):
            faults.append(f"tools must be a list of JSON schemas or functions, got {_shown(self.tools)}")
        faults += [
            f"chat_template_kwargs.{name} is refused: the template is told it by other means"
            for name in self.template_kwargs
            if name in _TAKEN
        ]
        if faults:
            raise ConfigError(*faults)


@attrs.frozen
class Image:
    """A content part that is one: a URL's, read, or as it was given."""

    image: Any


def chat_prompts(
    tokenizer: Any, messages: Any, options: ChatOptions, media: MediaPolicy | None = None
) -> list[TokensPrompt]:
    """The prompts of one conversation, or of a list of them.

    Raises:
        ConfigError: ``messages`` is neither, or see :func:`chat_prompt`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ConfigError(
            "messages must be a list of messages such as {'role': 'user', 'content': '...'}, or a list of "
            f"such lists, got {_shown(messages)}"
        )
    if isinstance(messages[0], Mapping):
        return [chat_prompt(tokenizer, messages, options, media=media)]
    return [
        chat_prompt(tokenizer, conversation, options, where=f"messages[{index}]", media=media)
        for index, conversation in enumerate(messages)
    ]


def chat_prompt(
    tokenizer: Any,
    conversation: Any,
    options: ChatOptions,
    *,
    where: str = "messages",
    media: MediaPolicy | None = None,
) -> TokensPrompt:
    """The prompt that ``conversation`` is in the chat template.

    Args:
        tokenizer: a transformers tokenizer.
        where: what messages of errors call the conversation.
        media: which images it may hold; None: the model takes text only.

    Raises:
        ConfigError: there is no tokenizer or template, a message is malformed or holds what is
            neither text nor an image that may be read, or the template refuses the conversation.
    """
    template = _template_of(tokenizer, options)
    as_parts = options.content_format == "openai" or (
        options.content_format == "auto" and _loops_over_content(template)
    )
    images: list[Any] = []
    messages = _messages(conversation, where, as_parts=as_parts, media=media, images=images)
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=None if options.tools is None else list(options.tools),
            chat_template=options.chat_template,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tokenize=False,
            **options.template_kwargs,
        )
    except Exception as error:  # what a template raises is its author's choice
        raise ConfigError(f"{where}: the chat template refuses it: {error}") from error
    # The template wrote the special tokens that belong there.
    with tokenizing(where):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = TokensPrompt(prompt_token_ids=list(ids), prompt=text)
    if images:
        prompt["multi_modal_data"] = {"image": images}
    return prompt


def _template_of(tokenizer: Any, options: ChatOptions) -> str:
    if tokenizer is None:
        raise ConfigError("chat wants a tokenizer and skip_tokenizer_init=True left none: use generate")
    if options.chat_template is not None:
        return options.chat_template
    if not tokenizer.chat_template:
        raise ConfigError("the model's tokenizer has no chat template: give chat_template, or use generate")
    template = tokenizer.chat_template
    return template if isinstance(template, str) else ""  # named templates: transformers chooses


def _loops_over_content(template: str) -> bool:
    """Whether the template takes a message's content as a list of parts."""
    from jinja2 import TemplateError, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateError:
        return False  # transformers will tell, or knows more tags
    named = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in named)
        for loop in tree.find_all(nodes.For)
    )


def _is_content(node: Any) -> bool:
    """``message.content`` or ``message['content']``."""
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    )


def _messages(
    conversation: Any, where: str, *, as_parts: bool, media: MediaPolicy | None, images: list[Any]
) -> list[dict[str, Any]]:
    """What the template is given; their images go to ``images``, in order."""
    if not isinstance(conversation, Sequence) or isinstance(conversation, str) or not conversation:
        raise ConfigError(f"{where} must be a list of messages, got {_shown(conversation)}")
    messages: list[dict[str, Any]] = []
    faults: list[str] = []
    for index, message in enumerate(conversation):
        try:
            messages.append(
                _message(message, f"{where}[{index}]", as_parts=as_parts, media=media, images=images)
            )
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(*faults)
    return messages


def _message(
    message: Any, where: str, *, as_parts: bool, media: MediaPolicy | None, images: list[Any]
) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConfigError(f"{where} must be a mapping with role and content, got {_shown(message)}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ConfigError(f"{where}.role must be a name such as 'user', got {role!r}")
    calls = message.get("tool_calls")
    if calls and (isinstance(calls, str | Mapping) or not isinstance(calls, Sequence)):
        raise ConfigError(f"{where}.tool_calls must be a list of calls, got {_shown(calls)}")
    if message.get("content") is None and not calls:
        raise ConfigError(f"{where}.content is missing: give a text")
    parts = _parts(message.get("content"), f"{where}.content", media)
    images += [part.image for part in parts if isinstance(part, Image)]
    content: Any
    if as_parts:
        content = [
            {"type": "image"} if isinstance(part, Image) else {"type": "text", "text": part} for part in parts
        ]
    else:
        token = media.image_token if media is not None else ""
        content = "\n".join(token if isinstance(part, Image) else part for part in parts)
    told = {**message, "content": content}
    if calls:
        told["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)
        ]
    return told


def _parts(content: Any, where: str, media: MediaPolicy | None) -> list[str | Image]:
    """The texts and images of a message: its parts, or the one text it is."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, Sequence):
        raise ConfigError(f"{where} must be a text or a list of parts, got {_shown(content)}")
    return [_part(part, f"{where}[{index}]", media) for index, part in enumerate(content)]


def _part(part: Any, where: str, media: MediaPolicy | None) -> str | Image:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise ConfigError(
            f"{where} must be a text part such as {{'type': 'text', 'text': '...'}}, got {_shown(part)}"
        )
    if kind in IMAGE_PARTS:
        if media is None:
            raise ConfigError(f"{where} is of type {kind!r}, which is refused: {TEXT_ONLY}")
        return _image(part.get(IMAGE_PARTS[kind]), f"{where}.{IMAGE_PARTS[kind]}", media)
    if kind not in TEXT_PARTS:
        raise ConfigError(
            f"{where} is of type {kind!r}, which is refused: only text and images are built so far"
        )
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ConfigError(f"{where}.{TEXT_PARTS[kind]} must be a text, got {_shown(text)}")
    return text


def _image(given: Any, where: str, media: MediaPolicy) -> Image:
    """``given``: a URL, ``{"url": URL}``, or a PIL image."""
    url = given.get("url") if isinstance(given, Mapping) else given
    if isinstance(url, str):
        return Image(media.read(url, where))
    if is_image(given):
        return Image(given)
    raise ConfigError(
        f"{where} must be a URL such as {{'url': 'data:image/png;base64,...'}}, or a PIL.Image.Image, got "
        f"{_shown(given)}"
    )


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Templates want a call's arguments as a mapping; the API that wrote them gives JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ConfigError(f"{where} must be a mapping with function, got {_shown(call)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}.function.arguments is not JSON: {error}") from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
