"""Hiding secrets in what is shown or recorded: variables, settings and command lines with the names of secrets.

A name decides, not a value: nobody can tell a password from another word. `WANDB_API_KEY`, `--wandb-key` and
`trainer.api_key` are secrets; `--max-tokens`, `--eos-token` and `--prompt-key`, which count or name something, are not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
"""Shown in place of a secret."""

_SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH_?(TOKEN|KEY)|_(PWD|PAT)$"
    r"|(^|_)AUTH(ORIZATION)?$"
)
_PERHAPS = re.compile(r"(TOKEN|KEY)(_|$)|(^|_)PASS$")
"""Names of secrets unless the value is a number, or the rest of the name says that it is something else."""
_COLUMNS = (
    "input output prompt label text image video audio reward fn data meta metadata tool tools message messages system "
    "context query question answer response chosen rejected target score source sort group primary foreign partition "
    "cache dict json column field feature split task state action obs observation env index"
)
_SPECIAL = "eos bos pad unk cls sep mask stop start end special image video audio think max min num per new first last"
_NOT_SECRET = re.compile(
    rf"_(FILE|PATH|DIR)$|(^|_)({'|'.join(_COLUMNS.upper().split())})_KEY$"
    rf"|(^|_)({'|'.join(_SPECIAL.upper().split())})_TOKEN(_|$)|TOKEN_(ID|TYPE|LEN|LENGTH|COUNT|LIMIT)S?$|KEY_(NAME|TYPE)$"
)
_HARMLESS = re.compile(r"(true|false|yes|no|none|null|auto|[01]|\*\*\*|\$\w+|\$\{[^{}]*\}|)", re.IGNORECASE)
"""Values that are no secrets whatever their name is: switches, and references to variables."""
_NUMBER = re.compile(r"[+-]?\d{1,12}(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)
_QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|(?:Bearer|Basic)\s+[^\s\"',;]+"
# Only where a word begins: from each of its letters, a long one would take minutes.
_SETTING = re.compile(r"(?<![\w.-])(?P<name>[\w.-]+)(?:[\"']\s*:\s*|:\s+|\s*=\s*)")
_SET = re.compile(rf"{_QUOTED}|[^\s\"',;&}}\]]+")
_FLAG = re.compile(r"(?<!\S)(?P<name>--?[A-Za-z][\w.-]*)\s+(?!-)")
_GIVEN = re.compile(rf"{_QUOTED}|\S+")


def is_secret(name: str, value: str) -> bool:
    """Tell whether a variable, a setting or a flag is a secret, by its name.

    >>> is_secret("WANDB_API_KEY", "abc"), is_secret("--max-tokens", "512"), is_secret("data.prompt_key", "prompt")
    (True, False, False)
    """
    if _HARMLESS.fullmatch(value):
        return False
    # `apiKey`, `--api-key` and `model.api_key` are spelt alike.
    words = re.sub(r"[^A-Z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()).strip("_")
    if _NOT_SECRET.search(words):
        return False
    return bool(_SECRET.search(words) or (_PERHAPS.search(words) and not _NUMBER.fullmatch(value)))


def hide(name: str, value: str) -> str:
    """Return the value of a variable as it may be shown.

    >>> hide("HF_TOKEN", "abc"), hide("PROXY", "http://me:abc@proxy:80")
    ('***', 'http://***@proxy:80')
    """
    return HIDDEN if is_secret(name, value) else hide_in_text(value)


def hide_in_data(data: Any, name: str = "") -> Any:
    """Hide the secrets in values as JSON has them.

    >>> hide_in_data({"lr": 1, "accounts": [{"user": "me", "password": "abc"}]})
    {'lr': 1, 'accounts': [{'user': 'me', 'password': '***'}]}
    """
    if isinstance(data, Mapping):
        return {key: hide_in_data(value, str(key)) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [hide_in_data(item, name) for item in data]
    return hide(name, data) if isinstance(data, str) else HIDDEN if is_secret(name, str(data)) else data


def hide_in_text(text: str) -> str:
    """Hide the secrets in a command line or in settings, such as JSON, within a text.

    >>> hide_in_text("WANDB_API_KEY=abc python train.py --lr 1 --password 'a b'")
    'WANDB_API_KEY=*** python train.py --lr 1 --password ***'
    """
    shown = _hide_values(_FLAG, _GIVEN, _hide_values(_SETTING, _SET, text))
    return "".join(map(_hide_users, re.split(r"(\s+)", shown))) if "://" in shown else shown


def hide_in_words(words: Sequence[str]) -> list[str]:
    """Hide the secrets in the words of a command.

    >>> hide_in_words(["train.py", "--token", "abc", "db.password=a b", "--eos-token", "</s>"])
    ['train.py', '--token', '***', 'db.password=***', '--eos-token', '</s>']
    """
    found: list[str] = []
    flag = ""
    for word in words:
        name, equals, value = word.partition("=")
        if flag and not word.startswith("-") and is_secret(flag, word):
            found.append(HIDDEN)
        elif equals and re.fullmatch(r"[-+~]*[\w./@-]+", name):
            found.append(f"{name}={hide(name, value)}")
        else:
            found.append(hide_in_text(word))
        flag = word if word.startswith("-") and not equals else ""
    return found


def _hide_values(names: re.Pattern[str], values: re.Pattern[str], text: str) -> str:
    parts, end = [], 0
    while found := names.search(text, end):
        parts.append(text[end : found.end()])
        end = found.end()
        # The value of a harmless name may begin with another name, and is not read: `ValueError: api_key=abc`.
        value = values.match(text, end) if is_secret(found["name"], "any") else None
        if value is not None and is_secret(found["name"], value[0][1:-1] if value[0][0] in "\"'" else value[0]):
            parts.append(HIDDEN)
            end = value.end()
    return "".join(parts) + text[end:]


def _hide_users(word: str) -> str:
    """Hide the user and the password in addresses: what is before an @, unless it is in a path."""
    parts, end = [], 0
    start = word.find("://") + 3
    while start >= 3 and (at := word.find("@", start)) >= 0:
        slash = word.find("/", start, at)
        hides = start < at and (slash < 0 or word.find(":", start, slash) >= 0)
        if hides:
            parts += [word[end:start], HIDDEN]
            end = at
        start = word.find("://", at if hides else start) + 3
    return "".join(parts) + word[end:]
