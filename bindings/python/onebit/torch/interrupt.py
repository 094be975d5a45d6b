"""Calls of the library that wait for other ranks, and can be interrupted."""

import os
import queue
import threading

_lock = threading.Lock()
_workers = {}  # of this process: its queue


def _work(jobs):
    while True:
        call, outcome, done = jobs.get()
        try:
            outcome.append((call(), None))
        except BaseException as reason:  # noqa: BLE001
            outcome.append((None, reason))
        call = None
        done.set()


def _jobs():
    """The queue of this process's thread, which a fork leaves behind."""
    with _lock:
        if os.getpid() not in _workers:
            _workers.clear()
            jobs = _workers[os.getpid()] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(jobs,), daemon=True, name="onebit-calls").start()
        return _workers[os.getpid()]


os.register_at_fork(after_in_child=_lock._at_fork_reinit)


def wait_for(comm, done):
    """Until another thread's call on the communicator is done. What interrupts the wait aborts it,
    and so tells all ranks."""
    try:
        while not done.wait(0.2):  # a signal may have been another thread's to receive
            pass
    except BaseException:
        if not done.is_set():
            comm.abort()
            done.wait()
        raise


def interruptible(comm, call):
    """What call() returns or raises, made by another thread: a call into the library would hold up
    Ctrl-C in the main thread until it ends."""
    if threading.current_thread() is not threading.main_thread() or comm.size == 1:
        return call()
    outcome, done = [], threading.Event()
    _jobs().put((call, outcome, done))
    wait_for(comm, done)
    result, reason = outcome.pop()
    if reason is not None:
        raise reason
    return result
