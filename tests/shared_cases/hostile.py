"""Values and whole files that have broken other readers of YAML, JSON and expressions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Raw:
    """Text that stands in a file as it is, not as a quoted value."""

    text: str


SCALARS: tuple[object, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 10**12, 10**18, -(10**30), 10**310, 10**4000,
    0.0, -0.0, 0.5, 1e-320, 1e-30, 1e30, 1.7e308, float("nan"), float("inf"), float("-inf"),
    "", " ", "x", "nan", "1e999", "true", "no", "null", "~", "<<", "=", "-", "..", "/etc/passwd",
    "../../x", "%s%n", "{micro_batch}", "{micro_batch.__class__}", "{0}", "{", "a" * 300,
    "\u202egnp.exe", "\u0663", "e\u0301", "\U0001f600", "\ufeff", "\x00", "\x1b[31m", "\ud800",
    "a\nb", "2026-01-01", "0x10", "010", "1_000", "1:30", "16GiB", "1e15GiB", "-1GiB", "nf4",
    "./tiny-model", "user:code", "os:system", "causal_lm", "command",
    [], {}, [[]], [None], [1, 1], [1, 1.0, True], {"": 1}, {"a": {"b": {}}}, ["q_proj", "q_proj"],
    [0.5, "x", None], {"min": 1, "max": 1e12, "step": 1}, {"min": 1, "max": 2, "step": 1e-300},
    {"min": -1e308, "max": 1e308, "step": 1e-308}, {"min": 1, "max": 1000, "step": 1},
    {"min": 5, "max": 1, "step": 1}, {"powers_of_two": {"min": 1, "max": 1e18}},
    {"powers_of_two": {"min": -1, "max": 0}}, {"mean": 1, "max": 1e300},
    {"quantiles": {"0.5": 10, "1": 5}}, {"histogram": {"edges": [0, 1], "counts": [0]}},
)  # fmt: skip

YAML_TEXTS = tuple(
    Raw(text)
    for text in (
        "&a [*a]", "&a {x: *a}", "*undefined", "&a", "!!binary aGk=", "!foo bar", "!!set {a, b}",
        '!!python/object/apply:os.system ["true"]', "!!python/name:os.system", "!!omap [a: 1]",
        "{<<: {a: 1}}", "{<<: [1]}", ".nan", ".inf", "-.inf", "1e999", "0x" + "f" * 400, "9" * 400,
        "9" * 5000, "1:2:3", "2026-13-45", "{a: 1, a: 2}", "{[1]: 2}", "{{}: 1}", "? [a]\n: b",
        '"\\ud800"', '"\\0"', '"\\UFFFFFFFF"', '"\\x"', "'", '"', "[", "}", "|", ">", "|9", "@",
        "`",
        "%", "- - -", "[" * 400, "{a: " * 400, "x" * 20_000, "---", "...", "\t", "%YAML 9.9",
        "[1, 2, 3" + ", 4" * 2000 + "]", "[&b [x, x], " + "*b, " * 200 + "1]",
    )
)  # fmt: skip

JSON_TEXTS = tuple(
    Raw(text)
    for text in (
        "NaN", "Infinity", "-Infinity", "1e999", "-0", "01", "9" * 400, "9" * 5000, '"\\ud800"',
        '"\\u0000"', '{"a": 1, "a": 2}', "[" * 400, "[" * 2000 + "]" * 2000, "'x'", "tru", ",", "}",
        '{"schema": 1, "schema": 2}', "[1,]", "\x00", '"' + "x" * 20_000 + '"',
    )
)  # fmt: skip

EXPRESSIONS: tuple[str, ...] = (
    "9**9**9", "9**9**9**9", "'a'*10**9", "'a' * 9 ** 12", "(1,2) * 10**12", "1e308 * 10", "1e400",
    "1e400 - 1e400", "10**30 * 10**30", "2 ** 64 ** 64", "2 ** -64 ** 64", "(-8) ** 0.5",
    "0 ** -1", "1 // 0", "1 % 0", "1 / 0.0", "-" * 498 + "1", "not " * 120 + "true",
    "(" * 240 + "1" + ")" * 240, "1" + "+1" * 240, "1 if " * 80 + "1", "1<" * 240 + "1",
    "micro_batch ** 64 ** 2", "micro_batch.__class__", "().__class__", "micro_batch()", "lambda: 1",
    "[x for x in (1,)]", "{1: 2}", "{1, 2}", "__import__('os').system('true')", "open('x', 'w')",
    "f'{1}'", "b'x'", "1j", "...", "1 << 9999", "~1", "1 @ 1", "1 | 1", "x := 1", "await x",
    "*(1,)", "yield", "round(1e30)", "round(1, -10**9)", "max()", "max((1,))", "min(1, 'a')",
    "abs(true)", "max(*(1,))", "max(key=1)", "floor(1e400)", "ceil(-1e-400)", "'a' < 1",
    "1 in 1", "'a' in 'abc'", "(1, 2) in (1, (1, 2))", "micro_batch is 1", "nan", "inf", "None",
    "true == false", "micro_batch && 1", "micro_batch = 1", "\x00", "a\nb", "# only a comment",
    "\\\n1", "1_0_0", "0x" + "f" * 400, "9" * 480, "9" * 499, "'" + "x" * 490 + "'", "x" * 600,
    "\u0663 + 1", "\ufb01oor(1)", "\U0001d41d", "'\ud800'", "\ud800", "1 if 1 else", "(",
    "effective_batch",
    "precision == nf4", "lora_rank >= 8 and", "micro_batch % (micro_batch - 1)",
    "1 / (lora_rank - 8)", "lora_targets * 10**9", "precision * 10**9", "grad_accum", "lora_alpha",
)  # fmt: skip


def bomb(levels: int, width: int = 10) -> str:
    """The billion laughs: a few lines of aliases that expand to `width ** levels` values."""
    lines = ["a0: &a0 [lol]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * width)}]")
    return "\n".join(lines) + "\n"


WHOLE_FILES: tuple[bytes, ...] = (
    b"", b"\n", b"\xef\xbb\xbf", b"\x00", b"\x00" * 4096, b"\xff\xfe", b"\x1f\x8b\x08\x00",
    b"PK\x03\x04",
    "name: x\nknobs: {}\n".encode("utf-16"), b"null", b"[]", b"{}", b"0", b'"x"', b"true", b"- x",
    b"#" * 1000, b"---\n---\n", b"--- a\n--- b\n", b"%YAML 1.1\n%TAG ! x\n", b"\t\t\t", b"\r\r\r",
    b"[" * 100_000, b"{" * 100_000, b"{a: " * 50_000, b"- " * 50_000, b"? " * 50_000,
    b"[{" * 50_000,
    b'{"a":' * 50_000, b"a" * 1_000_000, b"1" * 300_000, b'"' + b"x" * 300_000, b"!" * 10_000,
    b"&a " * 1000, b"* " * 1000, b"a: b: c", b"a:\n  b\n c", b"schema: 1\n", b'{"schema": 1}\n',
    b'{"schema": 1}\n' * 50, bomb(9).encode(), bomb(40, 2).encode(), b"&a [*a, *a]",
    b"a: &a {b: *a}",
    b"schema: 1\nmatmul: &a [*a]\n", b"schema: &a [*a]\n", b"gpus: &a {x: *a}\n",
    b"name: &a [*a]\nknobs: *a\n", b"\xc0\x80", b"\xed\xa0\x80", "\u2028\u2029\x85".encode(),
)  # fmt: skip
