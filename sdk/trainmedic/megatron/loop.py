"""A Megatron-LM training that goes back to a checkpoint within its processes.

``train()`` of Megatron-LM keeps its iteration and its data in local names, so it has to end and be called again. It is
ended by an exception from the last function that it calls in each iteration; then the state is loaded by Megatron-LM's
own ``load_checkpoint``, and the data are built anew, from the samples consumed up to there. Everything happens on all
tensor, pipeline and data ranks at the same iteration. Not here: what is called at which point of an iteration
(``callback``).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from trainmedic.client import Medic
from trainmedic.errors import TrainmedicError
from trainmedic.megatron import checkpoints
from trainmedic.recovery import left_out
from trainmedic.recovery.checkpoints import SavedCheckpoint
from trainmedic.recovery.health import CheckpointHealth
from trainmedic.recovery.loop_restart import LoopEnds, LoopRestart
from trainmedic.recovery.restarts import RestartLimits
from trainmedic.torch import randomness
from trainmedic.trainer.carried_files import CarriedFiles
from trainmedic.trainer.self_saving import SelfSavingLoop

REPLAYED = "the same batches again, by the samples consumed up to the checkpoint"

_BEGUN_TWICE = ("no_sync_func", "grad_sync_func", "param_sync_func")
"""What ``train()`` sets in the configuration, and expects to be as it was when it begins."""

_FOR_A_ROLLBACK = {
    "finetune": False,
    "no_load_optim": False,
    "no_load_rng": False,
    "ckpt_step": None,
    "override_ckpt_iteration": None,
}
"""Options of the first load, such as to begin from somebody else's weights, as they are for a rollback."""


class MegatronLoop(SelfSavingLoop):
    """One training, from its first iteration to the last, rollbacks included.

    ``megatron`` is the module ``megatron.training.training``, or one with its functions.
    """

    abandoned_name = "abandoned-{number}-{name}"

    def __init__(self, medic: Medic, megatron: Any, limits: RestartLimits, carried: CarriedFiles) -> None:
        super().__init__(medic, limits, carried)
        self._megatron = megatron
        self._build_data: Callable[[Any], Any] = megatron.build_train_valid_test_data_iterators
        self._providers: list[Any] = []  # of the data, one for each call that built some
        self._skipped: left_out.Ranges = []
        self._skipped_now = 0
        self._begun_with: dict[str, Any] = {}

    # --- in place of Megatron-LM's functions ------------------------------------------------------------

    def build_data(self, provider: Any) -> Any:
        """In place of ``build_train_valid_test_data_iterators``: build them, and note how."""
        self._providers.append(provider)
        return self._build_data(provider)

    def train(self, call: Callable[..., Any], named: dict[str, Any]) -> Any:
        """In place of ``train``: `call` it with its arguments, again after each rollback. Returns what it returns."""
        self._begun_with = {name: getattr(named["config"], name, None) for name in _BEGUN_TWICE}
        self._recall_skipped()

        def attempt(restart: LoopRestart | None) -> Any:
            if restart is not None:
                self._go_back(self._prepare(restart), restart, named)
            elif self.is_to_skip(self._args.iteration):
                self._move_data(named)
            while True:
                try:
                    return call(**named)
                except LoopEnds:
                    self._clear_away(named)
                    if self.restarts.is_asked:
                        return None
                    self._move_data(named)

        return self.restarts.run(attempt)

    def is_to_skip(self, iteration: int) -> bool:
        """Whether the iteration after that one is left out."""
        return left_out.contains(self._skipped, iteration)

    # --- going back -------------------------------------------------------------------------------------

    def _go_back(self, checkpoint: Path, restart: LoopRestart, named: dict[str, Any]) -> None:
        args = self._args
        self._load(checkpoint, named)
        self._put_back_carried(checkpoint)
        iterations = math.ceil(restart.skip_batches / self._accumulation)
        self._skipped_now = iterations * self._accumulation
        if iterations:
            self._skipped = [*self._skipped, (args.iteration, args.iteration + iterations)]
            if self._writes:
                left_out.write(self.directories[0], self._skipped)
        self._move_data(named)
        models = named["model"] if isinstance(named["model"], list) else [named["model"]]
        self._compare_losses(restart, self._step_of(checkpoint), models, [named["optimizer"]])

    def _load(self, checkpoint: Path, named: Mapping[str, Any]) -> None:
        """Load it into place. Raises what Megatron-LM raises; then only a restart of the job helps."""
        args, megatron = self._args, self._megatron
        model, optimizer, scheduler = named["model"], named["optimizer"], named["opt_param_scheduler"]
        kept = {name: getattr(args, name) for name in ("load", *_FOR_A_ROLLBACK) if hasattr(args, name)}
        vars(args).update({name: value for name, value in _FOR_A_ROLLBACK.items() if name in kept})
        args.load = args.save
        # Megatron-LM adds to the first, and asserts that the others are zero, for it loads only when it begins.
        scheduler.num_steps = 0
        args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
        overlaps = megatron.should_disable_forward_pre_hook(args)
        if overlaps:  # what is still being gathered would come in over what is loaded
            megatron.disable_forward_pre_hook(model)
        try:
            loaded = megatron.load_checkpoint(
                model, optimizer, scheduler, checkpointing_context=named.get("checkpointing_context")
            )
        finally:
            vars(args).update(kept)
            if overlaps:
                megatron.enable_forward_pre_hook(model)
        args.iteration, args.num_floating_point_operations_so_far = loaded
        if args.iteration != checkpoints.step_of(checkpoint):
            raise TrainmedicError(f"Megatron-LM loaded iteration {args.iteration} in place of {checkpoint.name}")

    def _move_data(self, named: dict[str, Any]) -> None:
        """Build the data from the place where training is; what is to be left out counts as done, by every count."""
        args = self._args
        while self.is_to_skip(args.iteration):
            stop = max(stop for start, stop in self._skipped if start <= args.iteration < stop)
            samples = (stop - args.iteration) * args.global_batch_size
            args.iteration = stop
            args.consumed_train_samples += samples
            args.skipped_train_samples += samples
        # Loaders draw random numbers when they begin, which those of the training that is repeated did before.
        with randomness.preserved():
            built = [self._build_data(provider) for provider in self._providers]
        train, valid = ([iterators[index] for iterators in built] for index in (0, 1))
        several = len(built) > 1  # with a virtual pipeline, one for each part of the model
        named["train_data_iterator"] = train if several else train[0]
        named["valid_data_iterator"] = valid if several else valid[0]

    def _clear_away(self, named: Mapping[str, Any]) -> None:
        """Clear away what ``train()`` has begun, as it would have done itself at its end."""
        megatron = self._megatron
        megatron.maybe_finalize_async_save(blocking=True)
        megatron.get_timers()("interval-time", log_level=0).stop()
        for name, value in self._begun_with.items():
            setattr(named["config"], name, value)

    def _put_aside(self, after: int) -> None:
        # First of all: a job that is started again loads what the tracker names.
        checkpoints.track(self.directories[0], after)
        super()._put_aside(after)

    def _prepare(self, restart: LoopRestart) -> Path:
        checkpoint = super()._prepare(restart)
        self._medic.group("put-aside").poll()  # every rank reads the tracker
        return checkpoint

    def _recall_skipped(self) -> None:
        if self._args.iteration == 0 and self._writes:
            left_out.forget(self.directories[0])
        self._skipped = self._recalled_left_out()

    # --- what TrainerLoop asks --------------------------------------------------------------------------

    @property
    def directories(self) -> list[Path]:
        return [Path(self._args.save or ".")]

    def _all_checkpoints(self) -> list[SavedCheckpoint]:
        return checkpoints.in_directory(self.directories[0])

    def _is_complete(self, checkpoint: Path) -> bool:
        return checkpoints.is_complete(checkpoint)

    def _step_of(self, checkpoint: Path) -> int:
        return checkpoints.step_of(checkpoint) or 0

    def _skipped_batches(self) -> int:
        return self._skipped_now

    @property
    def _accumulation(self) -> int:
        return int(self._megatron.get_num_microbatches())

    @property
    def _data(self) -> str:
        return REPLAYED

    # --- called by the callback -------------------------------------------------------------------------

    def begin(self, models: Sequence[Any]) -> None:
        """Take note that the training begins, and why it cannot go back or leave out batches, where it cannot."""
        args = self._args
        self.no_restart_because = _no_restart(args)
        self._no_skip_because = _no_skip(args)
        if args.save:
            self.directories[0].mkdir(parents=True, exist_ok=True)
        self.carried.begin(models)
        if args.iteration == 0:
            self._start_fresh()
        elif args.load:
            loaded = checkpoints.path_of(Path(args.load), args.iteration)
            self._put_back_carried(loaded, with_random=not getattr(args, "no_load_rng", None))

    def keep(self, iteration: int) -> None:
        """Keep in the checkpoint that Megatron-LM has begun what this rank carries. Raises OSError."""
        path = checkpoints.path_of(self.directories[0], iteration)
        if path.is_dir():  # else it went to another place
            self.carried.save(path)

    def has_saved(self, iteration: int) -> bool:
        """Whether the checkpoint of that iteration is whole, as seen from here."""
        return checkpoints.tracked(self.directories[0]) >= iteration

    def mark(self, iteration: int, health: CheckpointHealth) -> None:
        """Note on the checkpoint of that iteration, which is whole, what it is to be judged by."""
        if self._writes:
            for checkpoint in self._all_checkpoints():
                if checkpoint.step == iteration:
                    checkpoints.mark(checkpoint.path, health)

    @property
    def _args(self) -> Any:
        return self._megatron.get_args()


def _no_restart(args: Any) -> str:
    """Why a training with these options cannot go back; empty where it can."""
    if not args.save:
        return "there are no checkpoints: --save"
    cannot = {
        "--no-save-optim": getattr(args, "no_save_optim", None),
        "--no-save-rng": getattr(args, "no_save_rng", None),
        "--dataloader-type external": getattr(args, "dataloader_type", None) == "external",
        "--profile": getattr(args, "profile", None),
        "--log-energy": getattr(args, "log_energy", None),
        "--perform-rl-step": getattr(args, "perform_rl_step", None),
        "--use-torch-fsdp2": getattr(args, "use_torch_fsdp2", None),
        "--cuda-graph-impl": getattr(args, "cuda_graph_impl", None) not in (None, "none"),
        "--enable-cuda-graph": getattr(args, "enable_cuda_graph", None),
        "--optimizer-cuda-graph": getattr(args, "optimizer_cuda_graph", None),
    }
    named = [option for option, value in cannot.items() if value]
    return f"with {named[0]} the training cannot be gone back to as it was" if named else ""


def _no_skip(args: Any) -> str:
    """Why a training with these options cannot leave out batches; empty where it can."""
    cannot = {
        "--rampup-batch-size": getattr(args, "rampup_batch_size", None),
        "--phase-transition-iterations": getattr(args, "phase_transition_iterations", None),
        "--override-opt-param-scheduler": getattr(args, "override_opt_param_scheduler", None),
    }
    named = [option for option, value in cannot.items() if value]
    return f"with {named[0]} the schedule would not know of it; ask with skip_batches: 0" if named else ""
