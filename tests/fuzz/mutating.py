"""Damaged documents, made quickly: bytes and tokens of good ones changed by a random generator."""

from __future__ import annotations

import re
from random import Random

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null|[][{}:,]|\s+|[^\s]')
_SCALARS = [
    b"null", b"true", b"false", b"0", b"-0", b"1", b"-1", b"0.0", b"-0.0", b"1e999", b"-1e999", b"1e-999", b"NaN",
    b"Infinity", b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"1" + b"0" * 400,
    b"9" * 4300, b"9" * 4301, b"1.7976931348623157e308", b"0.1e1", b"1E400", b"00", b"01", b"+1", b"0x10", b"1_000",
]  # fmt: skip
_TEXTS = [
    b'""', b'"x"', b'"\\u0000"', b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\u202e"', b'"\\u001b[2J"', b'"\xc3\xa9"',
    b'"\xff"', b'"\\"', b'"..",', b'"../../../etc/passwd"', b'"/etc/passwd"', b'"a/b/c"', b'"cuda/sm_90/.."',
    b'"cuda/../sm_90"', b'".hidden"', b'"con"', b'"x' + b"y" * 300 + b'"', b'"__class__"', b'"_items"', b'"dims"',
    b'"rows"', b'"hidden"', b'"forward"', b'"backward"', b'"scheme"', b'"ok"', b'"wrong"', b'"noisy"', b'"bfloat16"',
    b'"cuda:row"', b'"any:eager"', b'"__import__(\'os\').system(\'true\')"', b'"!!python/object:os.system"',
    b'"cos\\nsystem\\n(S\'true\'\\ntR."', b'"sha256:' + b"0" * 64 + b'"', b'"digest"', b'"schema"', b'"op"',
    b'"device"', b'"config"', b'"time_us"', b'"num_warps"', b'"${HOME}"', b'"%n%s"', b'"\\n"',
]  # fmt: skip
_SHAPES = [
    b"[]", b"{}", b"[[]]", b"[{}]", b'{"a": 1}', b'{"a": {}}', b'{"": 0}', b'{"a": 1, "a": 2}', b'{"1": 1}',
    b'{"__class__": "x"}', b"[null, null]", b'{"rows": 512, "hidden": 4096}', b'{"rows": true}', b'{"rows": 512.0}',
    b"[" * 50 + b"]" * 50, b"[" * 990 + b"]" * 990, b'{"a":' * 330 + b"1" + b"}" * 330, b"[" * 3000,
    b"[" + b"0," * 70 + b"0]", b"{" + b",".join(b'"k%d": %d' % (n, n) for n in range(70)) + b"}",
]  # fmt: skip
HOSTILE = [*_SCALARS, *_TEXTS, *_SHAPES]
_STRAY = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\x00", b"\xef\xbb\xbf", b"\xff\xfe", b"/*", b"//", b"\r\n"]


class Mutator:
    """Makes inputs of seeds.

    Args:
        seeds: good documents.
        random: what decides; the same one gives the same inputs.
    """

    def __init__(self, seeds: list[bytes], random: Random) -> None:
        self.random = random
        self.seeds = seeds
        self.tokens = [_TOKEN.findall(seed) for seed in seeds]
        self.values = [
            [place for place, token in enumerate(tokens) if token not in b"{}[]:," and not token.isspace()] or [0]
            for tokens in self.tokens
        ]
        self.lines = [seed.split(b"\n") for seed in seeds]

    def make(self) -> bytes:
        """The next input: usually one or two things are wrong with it, seldom many."""
        which = int(self.random.random() * len(self.seeds))
        kind = self.random.random()
        if kind < 0.6:
            data = self._of_tokens(which)
        elif kind < 0.72:
            data = self._of_lines(which)
        else:
            data = self.seeds[which]
        return self._of_bytes(data) if kind >= 0.66 else data

    def _times(self) -> int:
        chance = self.random.random()
        return 1 if chance < 0.7 else 2 if chance < 0.9 else 1 + int(chance * 16)

    def _of_tokens(self, which: int) -> bytes:
        random, tokens, values = self.random, list(self.tokens[which]), self.values[which]
        for _ in range(self._times()):
            place, how = values[int(random.random() * len(values))], random.random()
            if how < 0.7:
                tokens[place] = HOSTILE[int(random.random() * len(HOSTILE))]
            elif how < 0.8:
                tokens[place] = tokens[values[int(random.random() * len(values))]]
            elif how < 0.88:
                tokens[place] = b""
            elif how < 0.94:
                tokens[place] += _STRAY[int(random.random() * len(_STRAY))]
            else:
                end = place + 1 + int(random.random() * 40)
                tokens[place:end] = [HOSTILE[int(random.random() * len(HOSTILE))]]
                tokens += [b""] * 41  # so that the places of the others exist
        return b"".join(tokens)

    def _of_lines(self, which: int) -> bytes:
        random, lines = self.random, list(self.lines[which])
        for _ in range(self._times()):
            one, other = int(random.random() * len(lines)), int(random.random() * len(lines))
            how = random.random()
            if how < 0.35:
                lines[one], lines[other] = lines[other], lines[one]
            elif how < 0.6:
                lines.insert(one, lines[other])
            elif how < 0.8:
                theirs = self.lines[int(random.random() * len(self.lines))]
                lines[one] = theirs[int(random.random() * len(theirs))]
            elif len(lines) > 1:
                del lines[one]
        return b"\n".join(lines)

    def _of_bytes(self, data: bytes) -> bytes:
        random = self.random
        for _ in range(self._times()):
            size = len(data)
            at, how = int(random.random() * (size + 1)), random.random()
            if how < 0.25:
                data = data[:at] + bytes((int(random.random() * 256),)) + data[at + 1 :]
            elif how < 0.45:
                flipped = bytes(byte ^ (1 << int(random.random() * 8)) for byte in data[at : at + 1])
                data = data[:at] + flipped + data[at + 1 :]
            elif how < 0.6:
                data = data[:at] + data[at + 1 + int(random.random() * 30) :]
            elif how < 0.75:
                data = data[:at] + HOSTILE[int(random.random() * len(HOSTILE))] + data[at:]
            elif how < 0.85:
                data = data[:at] + _STRAY[int(random.random() * len(_STRAY))] + data[at:]
            elif how < 0.92:
                data = data[:at] + data[at : at + int(random.random() * 60)] * 2 + data[at:]
            elif how < 0.97:
                data = data[:at]
            else:
                data = data[:at] + self.seeds[int(random.random() * len(self.seeds))][at:]
        return data
