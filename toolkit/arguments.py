"""Typed flags: the one source of `--help`, yaml recipes and checks.

A flag is a dataclass field made with `flag(default, "help text")`. A task script derives its own flags
from `Arguments` and reads them with `parse`. Nothing here imports torch, so `--help` is instant.
"""

from dataclasses import dataclass

from toolkit.flags import changed, flag, parse

__all__ = ["SCHEDULES", "Arguments", "changed", "flag", "parse"]

SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)


@dataclass
class Arguments:
    """Flags that every task has. Strategy and precision are not here: they belong to the accelerate config."""

    # Model
    model_name_or_path: str | None = flag(None, "Model folder or Hub name. Default: the demo model.")
    config_name: str | None = flag(None, "Config folder or Hub name, if not the model's own.")
    tokenizer_name: str | None = flag(None, "Tokenizer folder or Hub name, if not the model's own.")
    model_revision: str = flag("main", "Branch, tag or commit of a Hub model.")
    trust_remote_code: bool = flag(False, "Allow code that comes with a Hub model to run here.")
    cache_dir: str | None = flag(None, "Where downloads and encoded data are cached.")
    attn_implementation: str | None = flag(None, "Attention kernel that transformers shall use, e.g. sdpa.")
    dropout: float | None = flag(None, "Overrides every dropout probability of the model.", defines=True)
    torch_compile: bool = flag(False, "Compile each block of the model at its first use: one process, or DDP.")

    # Adapters (LoRA)
    use_peft: bool = flag(False, "Train adapters of low rank (LoRA) in place of the model's own weights.", defines=True)
    lora_r: int = flag(8, "Rank of the adapters.", defines=True)
    lora_alpha: float = flag(16.0, "What adapters add is multiplied by this over the rank.", defines=True)
    lora_dropout: float = flag(0.0, "Dropout of what goes into the adapters.", defines=True)
    lora_target_modules: list[str] = flag(
        ["all-linear"], "Layers that get an adapter, e.g. q_proj; all-linear: all of the blocks.", defines=True
    )
    merge_adapter: bool = flag(False, "Save the whole model with the adapters merged into it, not the adapters alone.")

    # Data
    dataset_name: str | None = flag(None, "Hub data set, or a folder made by datasets' save_to_disk.")
    dataset_config_name: str | None = flag(None, "Configuration of the Hub data set.")
    train_file: str | None = flag(None, "CSV, TSV, JSON, JSONL or Parquet file to train on.")
    validation_file: str | None = flag(None, "File to evaluate on.")
    test_file: str | None = flag(None, "File to predict, with or without labels; gives predictions.csv.")
    validation_split_percentage: float | None = flag(
        None, "Percentage of the training rows held out for evaluation where there is no validation file."
    )
    delimiter: str | None = flag(None, "Column delimiter of CSV files. Default: found from the header.")
    quoting: str = flag("csv", "csv: quotes group a field; none: a quote is a character.", ("csv", "none"))
    column_names: list[str] | None = flag(None, "Column names of CSV/TSV files without a header line.")
    max_length: int | None = flag(None, "Longest sample in tokens. Default: what model and tokenizer allow.")
    max_train_samples: int | None = flag(None, "Train on the first N samples only.")
    max_eval_samples: int | None = flag(None, "Evaluate on the first N samples only.")
    preprocessing_num_workers: int | None = flag(None, "Processes that tokenize. Default: the tokenizer's threads.")
    dataloader_num_workers: int = flag(0, "Processes that collate batches ahead of the step.")

    # The step
    global_batch_size: int | None = flag(None, "Samples per optimizer step, whatever the machine. Default: 32.")
    per_device_train_batch_size: int | None = flag(
        None,
        "Upper bound of one micro-batch per device. With --gradient_accumulation_steps it defines the "
        "global batch as their product with the number of data-parallel devices, as in HF Trainer.",
    )
    gradient_accumulation_steps: int | None = flag(None, "Only together with --per_device_train_batch_size.")
    per_device_eval_batch_size: int | None = flag(None, "Upper bound of one evaluation batch. Default: 64.")
    train_sampling_strategy: str = flag(
        "random",
        "group_by_length puts samples of similar length into one global batch, which changes the training.",
        ("random", "group_by_length"),
        defines=True,
    )
    num_train_epochs: float = flag(3.0, "Passes over the training data.")
    max_steps: int | None = flag(None, "Optimizer steps; overrides --num_train_epochs.")
    optim: str = flag("adamw", "Optimizer.", ("adamw", "sgd"), defines=True)
    learning_rate: float = flag(5e-5, "Highest learning rate.", defines=True)
    adam_beta1: float = flag(0.9, "AdamW's beta1.", defines=True)
    adam_beta2: float = flag(0.999, "AdamW's beta2.", defines=True)
    adam_epsilon: float = flag(1e-8, "AdamW's epsilon.", defines=True)
    weight_decay: float = flag(0.0, "Decoupled weight decay of matrices outside normalisation layers.", defines=True)
    lr_scheduler_type: str = flag("linear", "Learning-rate schedule.", SCHEDULES, defines=True)
    warmup_steps: float = flag(0.0, "Warm-up steps; below 1 a share of all steps.", defines=True)
    max_grad_norm: float = flag(1.0, "Clip the norm of the whole gradient to this; 0: no clipping.", defines=True)
    label_smoothing_factor: float = flag(0.0, "Label smoothing of the training loss.", defines=True)
    skip_nonfinite_steps: int = flag(0, "How many steps with a non-finite loss or gradient to skip before stopping.")
    gradient_checkpointing: bool = flag(False, "Recompute activations in the backward pass to save memory.")
    seed: int = flag(42, "Seed of initialisation, order and dropout.", defines=True)
    full_determinism: bool = flag(False, "Bit-equal repetition on a GPU, at some cost in speed.")

    # The cut that is not the accelerate config's
    data_parallel: bool = flag(
        False, "One process drives all GPUs through torch's own module: the documented baseline."
    )
    data_parallel_replicas: int | None = flag(None, "Replicas of the --data_parallel rehearsal on a CPU. Default: 2.")
    data_parallel_loss: str = flag(
        "gathered",
        "Where --data_parallel computes the loss: gathered on the first device, or in each replica.",
        ("gathered", "replica"),
    )
    pipeline_stages: int = flag(1, "Split the layers over so many consecutive ranks: pipeline parallelism.")
    pipeline_microbatches: int | None = flag(
        None, "Micro-batches of a step in the pipeline; 1: plain model parallelism. Default: 4 per stage."
    )
    pipeline_schedule: str = flag(
        "1f1b", "1f1b holds fewer activations than gpipe and idles as long.", ("1f1b", "gpipe")
    )

    # Evaluation, logging, output
    eval_strategy: str = flag("epoch", "When to evaluate beside the end of training.", ("no", "steps", "epoch"))
    eval_steps: float | None = flag(None, "Steps between evaluations; below 1 a share of all steps.")
    diagnostics: bool = flag(
        False, "Measure a step: bytes sent and held, idle share, replicas, peak memory; diagnostics.json."
    )
    profile: bool = flag(
        False,
        "The same, and what the time of steps 4 to 6 is spent on: data, forward, backward, communication, optimizer.",
    )
    save_strategy: str = flag(
        "epoch", "When to write a checkpoint in the course of training.", ("no", "steps", "epoch")
    )
    save_steps: float = flag(
        500.0, "Steps between checkpoints with --save_strategy steps; below 1 a share of all steps."
    )
    save_total_limit: int | None = flag(2, "Checkpoints to keep: the oldest go first, never the best or the newest.")
    async_save: bool = flag(False, "Write checkpoints in the background, from a copy in main memory.")
    resume_from_checkpoint: str | None = flag(
        None, "A checkpoint to go on from; auto: the newest whole one in --output_dir, if there is one."
    )
    allow_changed: list[str] | None = flag(
        None, "What may differ from the checkpoint's training, by the names that the error tells, e.g. learning_rate."
    )
    load_best_model_at_end: bool = flag(False, "End with the weights of the best evaluation.")
    metric_for_best_model: str | None = flag(None, "Figure that tells the best evaluation. Default: loss.")
    greater_is_better: bool | None = flag(None, "Whether it is better greater. Default: unless it is a loss.")
    early_stopping_patience: int | None = flag(None, "Evaluations without a better one after which to stop.")
    logging_steps: int = flag(10, "Steps between log lines where there is no terminal, and between tracker entries.")
    report_to: str = flag("none", "Tracker.", ("none", "tensorboard", "wandb", "trackio"))
    output_dir: str | None = flag(None, "Where the model and all results go. Default: output/<task>.")
    overwrite_output_dir: bool = flag(False, "Replace the results of an earlier run in --output_dir.")
    push_to_hub: bool = flag(False, "Upload the model when training has ended.")
    hub_model_id: str | None = flag(None, "Hub repository to push to.")
