"""All planted faults with the rule that should name them, and the healthy controls."""

from collections.abc import Callable
from dataclasses import dataclass

from planted import habits, later, learning, learning_later, learning_unseen, loops, on_gpu, seed
from stoker.doctor.probe import Probe


@dataclass(frozen=True)
class Case:
    make: Callable[[bool], Probe]
    rule: str | None  # None: healthy
    tuned: bool = True  # written beside the rules; False: after them, and blind
    quick: bool = False  # goes into the gate: quick, and far from any threshold
    gpu: bool = False  # needs one
    learning: bool = False  # what is wrong is what it learns

    @property
    def name(self) -> str:
        return self.make.__name__


CASES = (
    Case(loops.zero_workers, "workers-zero"),
    Case(loops.many_workers, "workers-many"),
    Case(loops.far_storage, "fetch-latency"),
    Case(loops.lazy_disk, "cold-storage"),
    Case(loops.shuffled_files, "shuffle", quick=True),
    Case(loops.slow_collate, "collate"),
    Case(loops.python_loop, "host"),
    Case(loops.prints, "logging"),
    Case(loops.slow_logger, "logging"),
    Case(loops.saves_every_step, "checkpoint"),
    Case(loops.optimizer_loop, "optimizer"),
    Case(loops.small_batch, "batch"),
    Case(loops.padded, "padding"),
    Case(loops.doubles, "precision"),
    Case(loops.recompiles, "recompile"),
    Case(loops.hoards, "memory-creep"),
    Case(loops.ahead_of_memory, "prefetch-memory"),
    Case(loops.epoch_gap, "epoch-gap"),
    Case(later.lightning_zero_workers, "workers-zero", tuned=False),
    Case(later.lightning_prints, "logging", tuned=False),
    Case(later.slow_generator, "loader", tuned=False),
    Case(later.ragged_attention, "host", tuned=False),
    Case(later.lists_to_tensors, "collate", tuned=False),
    Case(later.csv_every_step, "logging", tuned=False),
    Case(later.activations_saved, "checkpoint", tuned=False),
    Case(later.sgd_by_hand, "optimizer", tuned=False),
    Case(later.keeps_graphs, "memory-creep", tuned=False),
    Case(later.one_image_at_a_time, "batch", tuned=False),
    Case(later.wide_images, "precision", tuned=False),
    Case(later.thrashing, "shuffle", tuned=False),
    Case(later.bucket_far_away, "fetch-latency", tuned=False),
    Case(later.narrow_link, "fetch-bandwidth", tuned=False),
    Case(later.padded_little_used, "padding", tuned=False),
    Case(loops.healthy_products, None),
    Case(loops.healthy_workers, None),
    Case(loops.healthy_images, None, quick=True),
    Case(loops.healthy_sequence, None),
    Case(later.healthy_lightning, None, tuned=False),
    Case(later.healthy_recurrent, None, tuned=False),
    Case(later.healthy_deep, None, tuned=False),
    Case(later.healthy_slow_storage, None, tuned=False),
    Case(later.healthy_logs_now_and_then, None, tuned=False),
    Case(seed.seeds_own, "attention", gpu=True),
    Case(seed.seeds_loop, "host", gpu=True),
    Case(on_gpu.single_precision, "precision", gpu=True),
    Case(on_gpu.reads_the_loss, "sync", gpu=True),
    Case(on_gpu.pageable, "copy", tuned=False, gpu=True),
    Case(on_gpu.few_samples, "batch", tuned=False, gpu=True),
    Case(on_gpu.scores_written, "attention", tuned=False, gpu=True),
    Case(on_gpu.loop_over_samples, "host", tuned=False, gpu=True),
    Case(on_gpu.channels_first, "layout", tuned=False, gpu=True),
    Case(on_gpu.between_steps, "workers-zero", tuned=False, gpu=True),
    Case(on_gpu.healthy_wide, None, tuned=False, gpu=True),
    Case(on_gpu.healthy_channels_last, None, tuned=False, gpu=True),
    Case(on_gpu.healthy_attention, None, tuned=False, gpu=True),
)

LESSONS = tuple(
    Case(make, rule, learning=True)
    for make, rule in (
        (learning.raw_inputs, "inputs-raw"),
        (learning.identifiers, "inputs-ids"),
        (learning.not_a_number, "inputs-not-finite"),
        (learning.leaked, "target-leaked"),
        (learning.beyond_the_classes, "labels-range"),
        (learning.one_label, "labels-constant"),
        (learning.rare_class, "labels-rare"),
        (learning.in_order, "order"),
        (learning.listed_twice, "duplicates"),
        (learning.judged_on_training, "validation-seen"),
        (learning.frozen_layer, "frozen"),
        (learning.detached, "no-gradient"),
        (learning.dead_units, "dead"),
        (learning.deep_and_plain, "vanishing"),
        (learning.rate_too_high, "rate-high"),
        (learning.rate_too_low, "rate-low"),
        (learning.others_labels, "labels-unrelated"),
        (learning.constant_answer, "nothing-learnt"),
        (learning.numbered_otherwise, "labels-differ"),
        (learning.two_swapped, "labels-differ"),
        (learning.optimizer_of_a_copy, "not-updated"),
        (learning.only_the_last, "accumulation"),
        (learning.added_up, "accumulation"),
        (learning.clipped_short, "clipped"),
        (learning.cosine_of_one, "not-finite"),
        (habits.mixes_with_one_label, "mixed-labels"),
        (habits.averages_for_nothing, "average-unused"),
        (habits.never_averages, "average-unused"),
        (habits.old_rate_comes_back, "rate-restored"),
        (habits.too_large_for_half, "not-finite"),
        (habits.mixes_both_labels, None),
        (habits.lends_its_average, None),
        (habits.goes_on_with_its_schedule, None),
        (habits.rare_in_training_only, None),
        (habits.accumulates_sixteen, None),
        (habits.few_long_sequences, None),
        (habits.sets_its_rate_by_hand, None),
        (habits.rates_of_their_own, None),
        (habits.masks_that_are_all_alike, None),
        (habits.drops_sparse_inputs, None),
        (habits.judges_what_is_inside, None),
        (habits.few_classes_a_batch, None),
        (learning.accumulates_well, None),
        (learning.clips_now_and_then, None),
        (learning.learns_classes, None),
        (learning.learns_numbers, None),
        (learning.learns_slowly, None),
        (learning.learns_images, None),
        (learning.learns_with_dropout, None),
        (learning.learns_deeply, None),
        (learning.learns_from_zero, None),
        (learning.learns_words, None),
    )
) + tuple(
    Case(make, rule, tuned=False, learning=True) for make, rule in (*learning_later.CASES, *learning_unseen.CASES)
)
