"""Names that want to run something, leave their folder, or be read as something else."""

from pathlib import Path

_FRAMES = ["$({})", "`{}`", "; {}", "| {}", "&& {}", "\n{}", "x\n#SBATCH --wrap={}", "'; {} #", '"; {} #', "x > {}"]
_ODD = [
    *("../x", "../../etc/x", "/etc/x", "-x", "--wrap", "--wrap=true", "a b", "a\tb", "a\0b", "%j", "%x/../..", "a%"),
    *("a\\b", "a;b", "a>b", "a<b", "a?b", "a{b}", "a(b)", "a!b", "a#b", "a~b", "~root", "a=b", "a:b", "a^b", "a'b"),
    *('a"b', "a$b", "$HOME", "${HOME}", "", " ", ".", "..", ".hidden", "_x", "a/b", "a/../b", "x" * 5000, "caf\u00e9"),
    *(
        "\u202ex",
        "a\u00a0b",
        "\u2028",
        "a\n",
        "a\r",
        "\ufeffa",
        "a ",
        "a;",
        "a$",
        "a\\",
        "a'",
        'a"',
        "a`",
        "\U0001f600",
    ),
]


def hostile_names(canary: Path) -> list[str]:
    """Returns more than a hundred; some of them make the file `canary` where a shell reads them."""
    commands = [f"touch {canary}", f"touch${{IFS}}{canary}", f"echo>{canary}"]
    framed = [frame.format(command) for frame in _FRAMES for command in commands]
    return [*framed, *_ODD, *(f"a{chr(code)}b" for code in range(1, 32))]
