"""Everything the engine can be told. One flat group, `train`, because people look for `--train.lr`."""

from typing import Annotated, Literal

from pydantic import Field

from stoker.settings import AlsoCalled, config


@config
class TrainConfig:
    epochs: Annotated[int, Field(ge=1), AlsoCalled("num_epochs", "max_epochs")] = 1
    steps: Annotated[int, Field(ge=1), AlsoCalled("max_steps")] | None = None  # stop here, if before the last epoch

    optimizer: Annotated[Literal["adamw", "sgd", "lamb"], AlsoCalled("optim")] = "adamw"  # sgd with Nesterov momentum
    lr: Annotated[float, Field(gt=0), AlsoCalled("learning_rate")] = 1e-3  # highest rate of the schedule
    lr_batch: Annotated[int, Field(ge=1)] | None = None  # samples a step that lr is stated for; None: used as it is
    lr_rule: Literal["linear", "sqrt"] = "linear"  # how lr grows with the number of samples a step beyond lr_batch
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of sgd
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # of adamw and lamb, like the next
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    weight_decay: Annotated[float, Field(ge=0), AlsoCalled("wd")] = 0.01  # not on norms, biases and embeddings
    layer_decay: Annotated[float, Field(gt=0, le=1), AlsoCalled("llrd", "layerwise_decay")] | None = (
        None  # of the rate, from each layer to the one before it; None: all layers learn at one rate
    )
    freeze: tuple[str, ...] | None = None  # beginnings of names of what is not trained; "!head": all but the head
    clip_norm: Annotated[float, Field(gt=0), AlsoCalled("grad_clip", "max_grad_norm")] | None = 1.0

    schedule: Literal["cosine", "onecycle", "constant", "step"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0), AlsoCalled("warmup")] = (
        100  # attention diverges when started at full rate
    )
    warmup_epochs: Annotated[float, Field(ge=0)] | None = None  # instead of warmup_steps
    final_share: Annotated[float, Field(ge=0, le=1)] = 0.01  # of the rate at the end of cosine and onecycle
    decay_every: Annotated[int, Field(ge=1)] | None = None  # steps, of schedule step; None: thirds of the run
    decay_by: Annotated[float, Field(gt=0, lt=1)] = 0.1  # factor of schedule step

    precision: Annotated[Literal["auto", "bf16", "fp16", "fp32"], AlsoCalled("amp", "dtype")] = "auto"  # bf16 on a GPU
    tf32: bool = True  # float32 matrix products on tensor cores, with ten bits of mantissa
    deterministic: bool = (
        True  # the same bits from the same seed on one machine, resumed or not; what it costs is in docs
    )
    compile: bool = False  # torch.compile with dynamic shapes
    cuda_graphs: bool = True  # one launch a step instead of one a kernel, on a GPU, where batches have one shape
    ema: Annotated[float, Field(gt=0, lt=1), AlsoCalled("ema_decay")] | None = None  # decay of averaged weights

    patience: Annotated[int, Field(ge=1), AlsoCalled("early_stopping", "early_stopping_patience")] | None = (
        None  # evaluations without a better score, after which the run ends
    )
    bad_steps: Annotated[int, Field(ge=1)] = 10  # in a row that are not finite end the run
    baseline_after: Annotated[int, Field(ge=1)] | None = 1000  # steps, after which a loss still at chance is reported

    log_every: Annotated[int, Field(ge=1)] = 20  # steps; reading the loss makes the GPU wait, so not every one
    norms_every: Annotated[int, Field(ge=1)] | None = 200  # steps, for gradient norms and update ratios of each layer
    evaluate_every: Annotated[int, Field(ge=1), AlsoCalled("eval_every")] | None = None  # steps; None: each epoch's end
    save_every: Annotated[int, Field(ge=1), AlsoCalled("checkpoint_every")] | None = None  # steps, besides evaluations
    keep_best: Annotated[int, Field(ge=0), AlsoCalled("save_top_k")] = (
        1  # checkpoints kept for their metric, besides the last
    )

    def without_effect(self) -> dict[str, str]:
        """Keys that change nothing beside the others, and why."""
        found: dict[str, str] = {}
        if self.schedule == "onecycle":
            found |= dict.fromkeys(("warmup_steps", "warmup_epochs"), "the schedule onecycle has a warm-up of its own")
        elif self.warmup_epochs is not None:
            found["warmup_steps"] = "train.warmup_epochs stands in its place"
        if self.schedule not in ("cosine", "onecycle"):
            found["final_share"] = f"the schedule is {self.schedule}"
        if self.schedule != "step":
            found |= dict.fromkeys(("decay_every", "decay_by"), f"the schedule is {self.schedule}, not step")
        others = ("beta1", "beta2") if self.optimizer == "sgd" else ("momentum",)
        found |= dict.fromkeys(others, f"the optimizer is {self.optimizer}")
        if self.lr_batch is None:
            found["lr_rule"] = "train.lr_batch does not say for how many samples the rate is"
        return found
