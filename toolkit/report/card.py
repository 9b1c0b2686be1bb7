"""The model card: what was trained, on what, with which result. Nothing that the run does not know."""

from pathlib import Path
from typing import Any

from toolkit.report.results import write_text

# Our names of figures -> the Hub's names of metrics.
HUB_METRICS = {
    "accuracy": "accuracy",
    "f1": "f1",
    "mcc": "matthews_correlation",
    "pearson": "pearsonr",
    "spearman": "spearmanr",
    "mse": "mse",
    "mae": "mae",
    "perplexity": "perplexity",
}
AUTO_CLASSES = {
    "text-classification": "AutoModelForSequenceClassification",
    "text-generation": "AutoModelForCausalLM",
    "fill-mask": "AutoModelForMaskedLM",
}


def model_card(path: Path, facts: dict[str, Any]) -> None:
    """Write a README.md with the Hub's front matter.

    Args:
        facts: all optional but `name`: `name` (title, and what to load), `pipeline_tag` (default
            text-classification), `base_model` (folder or Hub name), `data` (a sentence or a name), `labels`
            (list of names), `results` (figure -> number), `settings` (flag -> value), `versions` (library ->
            version), `adapter` (whether it is one of `base_model`).
    """
    results = {key: value for key, value in facts.get("results", {}).items() if value is not None}
    facts = {**facts, "results": results}
    sections = [_front_matter(facts), f"# {facts['name']}", _about(facts)]
    if results:
        sections += ["## Results", _table(("figure", "value"), {k: _shown(v) for k, v in results.items()})]
    sections += ["## Use", _use(facts)]
    for title, header, key in (
        ("Training", ("flag", "value"), "settings"),
        ("Versions", ("library", "version"), "versions"),
    ):
        if facts.get(key):
            sections += [
                f"## {title}",
                _table(header, {name: f"`{value}`" for name, value in facts[key].items()}),
            ]
    write_text(Path(path), "\n\n".join(sections) + "\n")


def _front_matter(facts: dict[str, Any]) -> str:
    import yaml

    pipeline = facts.get("pipeline_tag", "text-classification")
    library = "peft" if facts.get("adapter") else "transformers"
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": pipeline}
    if _is_hub_name(facts.get("base_model")):
        front["base_model"] = facts["base_model"]
    front["tags"] = ["accelerate", pipeline]
    metrics = [HUB_METRICS[name] for name in facts["results"] if name in HUB_METRICS]
    if metrics:
        front["metrics"] = metrics
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---"


def _about(facts: dict[str, Any]) -> str:
    base = facts.get("base_model")
    what = "An adapter (LoRA), fine-tuned" if facts.get("adapter") else "Fine-tuned"
    origin = f" from `{_shown_base(base)}`" if base else ""
    lines = [f"{what}{origin} with the toolkit, on Hugging Face Accelerate."]
    if facts.get("data"):
        lines.append(f"Data: {facts['data']}.")
    if facts.get("labels"):
        lines.append(f"Labels: {', '.join(f'`{label}`' for label in facts['labels'])}.")
    return "\n\n".join(lines)


def _use(facts: dict[str, Any]) -> str:
    pipeline, name = facts.get("pipeline_tag", "text-classification"), facts["name"]
    auto = AUTO_CLASSES[pipeline]
    imports, load = f"from transformers import AutoTokenizer, {auto}", f'{auto}.from_pretrained("{name}")'
    if facts.get("adapter"):  # the config beside it knows the labels, which the base model's does not
        imports = f"from peft import PeftModel\nfrom transformers import AutoConfig, AutoTokenizer, {auto}"
        base = _shown_base(facts["base_model"])
        load = f'{auto}.from_pretrained("{base}", config=AutoConfig.from_pretrained("{name}"))\n'
        load += f'model = PeftModel.from_pretrained(model, "{name}")'
    code = f"""```python
{imports}

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {load}
outputs = model(**tokenizer("Your text", return_tensors="pt"))
```"""
    if pipeline != "text-classification":
        return code
    return f'{code}\n\n```bash\ntoolkit predict {name} --text "Your text"\n```'


def _shown_base(base: str) -> str:
    """A folder's place on somebody's disk is nobody else's business: its name is enough."""
    return base if _is_hub_name(base) else Path(base).name


def _is_hub_name(name: str | None) -> bool:
    """Whether a base model is given as `owner/name` or `name` rather than as a folder."""
    return bool(name) and name.count("/") <= 1 and name[0] not in "./~" and not Path(name).exists()


def _table(header: tuple[str, str], rows: dict[str, Any]) -> str:
    lines = [f"| {header[0]} | {header[1]} |", "|---|---|"]
    lines += [f"| {name} | {value} |".replace("\n", " ") for name, value in rows.items()]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
