"""The requests and answers of the server: their fields, their description for OpenAPI, and their errors."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, ValidationError
from typing_extensions import TypeAliasType

from run_tools.errors import did_you_mean, short_repr

from .candidates import MATCH_CASE
from .words import LANGUAGES

SHOWN_ERRORS = 3
HALF = re.compile(rb"\\u[dD][89a-fA-F]")
KINDS = ("str", "dict", "list")  # of inputs in JSON


class Strict(BaseModel):
    """Types as in JSON, without conversions; other fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Document(Strict):
    """A document."""

    text: str
    title: str | None = None


def kind_of(value) -> str | None:
    """The kind of an input, one of `KINDS`."""
    kind = type(value).__name__
    return kind if kind in KINDS else None


def discriminated(kinds, message: str):
    """A union whose errors are those of the kind that was sent."""
    return Annotated[kinds, Discriminator(kind_of, custom_error_type="inputs", custom_error_message=message)]


OneInput = Annotated[str, Tag("str")] | Annotated[Document, Tag("dict")]
EachInput = discriminated(OneInput, 'Must be a text, or an object with "text" and optionally "title"')
EachInputs = TypeAliasType("EachInputs", Annotated[list[EachInput], FailFast(), Field(min_length=1)])
Inputs = discriminated(
    OneInput | Annotated[EachInputs, Tag("list")],
    'Must be a text, an object with "text" and optionally "title", or a list of them',
)
Phrases = TypeAliasType("Phrases", Annotated[list[str], FailFast(), Field(min_length=1)])
Synonyms = TypeAliasType("Synonyms", dict[str, Annotated[list[str], FailFast()]])
Candidates = discriminated(
    Annotated[Phrases, Tag("list")] | Annotated[Synonyms, Tag("dict")],
    "Must be a list of phrases, or an object of names with lists of their synonyms",
)


class Parameters(Strict):
    """Options of the pipeline; those that are left out have its defaults."""

    top_k: Annotated[int | None, Field(ge=1, le=10_000, description="Maximum number of keyphrases; null for all.")] = 10
    min_score: Annotated[float | None, Field(ge=0, le=1)] = None
    threshold: Annotated[float | None, Field(gt=0, lt=1)] = None
    style: Annotated[str | None, Field(description="A style of annotation, if the model has several.")] = None
    diversity: Annotated[float | None, Field(ge=0, le=1)] = None
    candidates: Annotated[
        Candidates | None, Field(description="Phrases to score, or names with lists of synonyms.")
    ] = None
    match_case: Annotated[Literal[MATCH_CASE] | None, Field(description="How candidates match words by case.")] = None
    nested: Annotated[bool | None, Field(description="false: no keyphrase inside another one.")] = None
    language: Annotated[
        Literal[LANGUAGES] | None, Field(description="The stemmer's language; null for no stemming.")
    ] = None
    on_long: Annotated[Literal["window", "error", "truncate"] | None, Field(description="For long documents.")] = None
    mentions: Annotated[bool, Field(description="Return all mentions of each keyphrase.")] = False


class KeyphraseRequest(Strict):
    """One document, or a list of them, and options that hold for all."""

    inputs: Inputs
    parameters: Parameters | None = None


class Mention(BaseModel):
    """An occurrence of a keyphrase: offsets in the text, or in the `field` of a document with a title."""

    start: int
    end: int
    score: float
    field: Literal["title", "text"] | None = None


class Keyphrase(BaseModel):
    """A keyphrase. Score and offsets of a candidate without mentions are null."""

    keyphrase: str
    score: float | None
    start: int | None
    end: int | None
    field: Literal["title", "text"] | None = None
    mentions: list[Mention] | None = None


class Result(BaseModel):
    """The keyphrases of a document, best first, or the reason why it could not be read."""

    keyphrases: list[Keyphrase] | None = None
    error: str | None = None


class Answer(BaseModel):
    """One result per document, in their order."""

    results: list[Result]


def request_schema() -> dict[str, Any]:
    """The OpenAPI entry of the request, whose body is parsed by `parse_body`."""
    schema = KeyphraseRequest.model_json_schema()
    definitions = schema.pop("$defs")

    def inline(node):
        """Replaces references, since an operation cannot define components."""
        if isinstance(node, list):
            return [inline(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inline(definitions[node["$ref"].rsplit("/", 1)[-1]])
        return {key: inline(value) for key, value in node.items()}

    example = {"inputs": "Graph cuts solve energy minimisation problems.", "parameters": {"top_k": 5}}
    content = {"application/json": {"schema": inline(schema), "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def error_responses() -> dict[int, dict]:
    """The OpenAPI entries of errors, each with a JSON object `{"detail": message}`."""
    descriptions = {
        400: "The body is not JSON.",
        408: "The body took too long.",
        413: "The body is too large.",
        415: "The content type is not application/json.",
        422: "A field, an option or a length is invalid.",
        503: "Too many documents wait. Try again after the seconds of Retry-After.",
    }
    detail = {"type": "object", "properties": {"detail": {"type": "string"}}}
    content = {"application/json": {"schema": detail}}
    return {status: {"description": text, "content": content} for status, text in descriptions.items()}


def parse_body(body: bytes) -> KeyphraseRequest:
    """The request of a body.

    Raises:
        HTTPException: 400 if it is not JSON in UTF-8, 422 if a field is missing, unknown or invalid. The message repeats no texts.
    """
    try:
        return KeyphraseRequest.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
    if errors[0]["type"] == "json_invalid":
        raise HTTPException(400, errors[0]["msg"] + why_not_json(body))
    lines = [describe(entry["loc"] or ("body",), entry) for entry in errors[:SHOWN_ERRORS]]
    more = f"; and {len(errors) - SHOWN_ERRORS} more" if len(errors) > SHOWN_ERRORS else ""
    raise HTTPException(422, "; ".join(lines) + more)


def why_not_json(body: bytes) -> str:
    """What a parser's message leaves open: bytes that are not UTF-8, and halves of a character."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        return f". The body is not UTF-8 (byte {error.start + 1}). Send UTF-8"
    return ". An escape such as \\ud83d is half of a character. Send both halves, or UTF-8" if HALF.search(body) else ""


def describe(place: Sequence[str | int], error: Mapping) -> str:
    """The place and the message of an error, with the value of an option and the name that was probably meant."""
    unknown = error["type"] == "extra_forbidden"
    parts = [part for part in place[:-1] if part not in KINDS] + [place[-1]] * (unknown or place[-1] not in KINDS)
    where = ".".join(str(part)[:60] for part in parts)
    is_option = place[0] == "parameters" and len(place) > 1
    if unknown:
        fields = Parameters if is_option else Document if "inputs" in place else KeyphraseRequest
        return f"{where}: is not a field.{did_you_mean(str(place[-1]), fields.model_fields)} See /docs"
    value = f", not {short_repr(error['input'])}" if is_option and ", not " not in error["msg"] else ""
    return f"{where}: {error['msg']}{value}"


def list_documents(inputs: str | Document | list) -> list[str | dict]:
    """The documents of a request, as the pipeline takes them."""
    inputs = inputs if isinstance(inputs, list) else [inputs]
    return [document if isinstance(document, str) else document.model_dump() for document in inputs]
