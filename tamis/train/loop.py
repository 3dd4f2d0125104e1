"""The training loop, to be read aloud: fetch, step, settle, evaluate, save, stop."""

from __future__ import annotations

from tamis.run.files.exit_codes import ExitCode
from tamis.run.files.halt import HaltFile
from tamis.run.files.heartbeat import Phase
from tamis.run.worker.signals import EXIT_CODE_OF, StopReason
from tamis.train.trainer import Session


def train(session: Session) -> ExitCode:
    """Train until the last step or until all ranks agree to stop; the exit code says which."""
    train, reason = session.config.train, None
    if session.step < train.steps and session.owes_evaluation():
        session.evaluate()
    while session.step < train.steps and reason is None:
        session.train_once()
        reason = session.settle()
        if _due(session.step, train.save_every):
            reason = session.settle(keep=0) or reason  # a step is only saved once its numbers have passed the guard
            session.save()
        if _due(session.step, train.eval_every) and session.step < train.steps:
            reason = session.settle(keep=0) or reason
            session.evaluate()
    reason = session.settle(keep=0) or reason
    return _stopped(session, reason) if session.step < train.steps else _done(session)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _stopped(session: Session, reason: StopReason | None) -> ExitCode:
    assert reason is not None
    session.save_if_new()
    if reason == "halt" and session.workers.is_main:
        session.progress.say(f"[tamis] halted at step {session.step}: {HaltFile(session.run.halt).consume()}")
        session.progress.say("[tamis] launch again, or pass --resume auto, to go on from here")
    return _ended(session, "halted", EXIT_CODE_OF[reason], reason)


def _done(session: Session) -> ExitCode:
    session.save_if_new()
    session.evaluate()
    return _ended(session, "done", ExitCode.DONE)


def _ended(session: Session, phase: Phase, code: ExitCode, detail: str | None = None) -> ExitCode:
    """The last beat. An end that is not saved is neither done nor halted: what was trained last exists nowhere."""
    if session.saved_step != session.step:
        phase, code, detail = "failed", ExitCode.CRASH, "the last step is not saved"
    session.telemetry.beat(phase, session.step, exit_code=int(code), detail=detail)
    return code
