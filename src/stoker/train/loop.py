"""The life of a run on one screen: batches, step, guard, log, evaluate, save."""

from stoker import console
from stoker.data.device import feed
from stoker.train.engine import Engine
from stoker.train.signals import stop_on_signals


def train(engine: Engine) -> tuple[dict[str, float], str | None]:
    """Trains to the end of the configuration, from wherever the engine stands.

    Returns the metrics of the last evaluation, and the signal that ended the run early, if one did.
    """
    config, run = engine.config, engine.run
    metrics: dict[str, float] = {}
    with stop_on_signals() as stop, console.progress("train", engine.total - engine.step, "steps") as bar:
        if engine.evaluation_due:
            metrics = engine.evaluate()
        for step in feed(run.training.steps(engine.position, config.epochs), run.device):
            if engine.is_done() or engine.bad_steps.stop_asked:
                break
            lr = run.lr_at(config, engine.step, engine.total)
            result = engine.compute(step, stop_asked=stop.by is not None)
            norms = engine.stepper.update(result, lr, with_norms=engine.norms_due)
            engine.advance(step, result, norms)
            if engine.step % config.log_every == 0 or engine.is_done():
                engine.log_interval(lr)
            if evaluation_is_due(engine):
                engine.save(evaluation_due=True)  # first: whatever happens to the evaluation, the step is kept
                metrics = engine.evaluate()
            elif config.save_every is not None and engine.step % config.save_every == 0:
                engine.save()
            bar.advance()
        engine.bad_steps.check()
        engine.write_norms()
        ended_early = engine.bad_steps.stop_asked and not engine.is_done()
        if ended_early:
            engine.save()
        engine.saver.wait()
    return metrics, (stop.by or "another rank") if ended_early else None


def evaluation_is_due(engine: Engine) -> bool:
    every = engine.config.evaluate_every
    if engine.is_done():
        return True
    if every is not None:
        return engine.step % every == 0
    return engine.position.consumed >= len(engine.run.training.plan)
