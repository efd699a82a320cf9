"""Shared by all tests: eight CPU devices, one compile cache per session, quick compilation, the default model."""

import atexit
import functools
import gc
import hashlib
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxspec.runtime import program
from jaxspec.runtime.store import program_files

# Before any backend starts. Eight devices let every tensor-parallel degree up to 8 run on any machine.
jax.config.update("jax_num_cpu_devices", 8)

# One compile cache for all processes of a session; never the user's own. A folder in the variable is kept between
# sessions (`make test` names one); an empty variable is a cold run. Workers and the processes that tests start inherit
# it. JAX's key is the program itself; programs of another processor lie in a folder of their own.
CACHE_VARIABLE = "JAXSPEC_TEST_CACHE"
if not os.environ.get(CACHE_VARIABLE):
    os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(prefix="jaxspec-test-")
    atexit.register(shutil.rmtree, os.environ[CACHE_VARIABLE], ignore_errors=True)
CACHE = Path(os.environ[CACHE_VARIABLE])
CPU_INFO = Path("/proc/cpuinfo")
PROCESSOR = re.search("^flags.*$", CPU_INFO.read_text(), re.MULTILINE) if CPU_INFO.exists() else None
PLACE = pytest.StashKey[int]()  # of a test, among those that run
COMPILED = str(CACHE / hashlib.sha256((PROCESSOR[0] if PROCESSOR else platform.machine()).encode()).hexdigest()[:8])
KEPT_S = 30 * 24 * 3600  # a program that no session has read for so long is removed
os.environ["JAXSPEC_COMPILE_CACHE"] = COMPILED


def use_session_cache():
    """Point JAX at the session's cache; small programs are kept too."""
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", COMPILED)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


use_session_cache()

# A stored program is known by the files of its code. Tests change functions in memory.
program_files.disabled = True

# The tools are no part of the package.
TOOLS = str(Path(__file__).parents[1] / "tools")
if TOOLS not in sys.path:
    sys.path.append(TOOLS)

# Options of XLA that compile our programs in three quarters of the time.
QUICK = {"xla_cpu_use_fusion_emitters": False}

# Tracing and lowering take most of a test whose programs are kept. Both make many objects that live on, which the
# collector would visit again and again, and note for each operation where in the code it stands, which no test reads.
gc.set_threshold(50_000, 20, 20)
jax.config.update("jax_traceback_in_locations_limit", 0)

# Linux gives a process 65,530 memory mappings, and each compiled program takes several: above, compiling crashes.
# Counting them takes as long as a short test does, so they are counted after each 100 programs compiled or loaded.
MAPPINGS = Path("/proc/self/maps")
MANY_MAPPINGS, UNCOUNTED_PROGRAMS = 25_000, 100
programs_made = 0


def note_program(name, duration, **details):
    """Count a program that was compiled or loaded, in whatever thread."""
    global programs_made
    programs_made += name.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(note_program)


def pytest_collection_modifyitems(items):
    """Run the tests of a case, of all files, one after the other: a process makes its engine once."""
    places = {}
    for item in items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        item.stash[PLACE] = places.setdefault(repr(case) if isinstance(case, tuple) else item.nodeid, len(places))
    items.sort(key=lambda item: item.stash[PLACE])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Compile with few optimisations, unless the test is marked; undo what a test did to the cache."""
    full = item.get_closest_marker("full_compilation") or item.get_closest_marker("real_model")
    jax.config.update("jax_disable_most_optimizations", not full)
    program.CPU_OPTIONS.clear()
    if not full:
        program.CPU_OPTIONS.update(QUICK)
    if not (jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir == COMPILED):
        compilation_cache.reset_cache()
        use_session_cache()
    result = yield
    forget_programs()
    return result


def forget_programs():
    """Let go of what the tests of this process compiled, once it adds up."""
    global programs_made
    if programs_made < UNCOUNTED_PROGRAMS:
        return
    programs_made = 0
    if not MAPPINGS.exists() or MAPPINGS.read_bytes().count(b"\n") < MANY_MAPPINGS:
        return
    for module in [*sys.modules.values()]:
        if (getattr(module, "__file__", None) or "").startswith(str(Path(__file__).parent)):
            for value in [*vars(module).values()]:
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
    jax.clear_caches()
    gc.collect()


def pytest_sessionfinish(session):
    """Remove programs from the kept cache that nothing uses any more."""
    if "PYTEST_XDIST_WORKER" in os.environ or not Path(COMPILED).is_dir():
        return
    old = time.time() - KEPT_S
    for entry in os.scandir(COMPILED):
        if entry.is_file() and max(entry.stat().st_atime, entry.stat().st_mtime) < old:
            os.unlink(entry.path)


@pytest.fixture(scope="session")
def llm():
    """The default model, loaded once per process. Tests that use it are marked `real_model`."""
    import jaxspec

    return jaxspec.LLM()


@pytest.fixture
def compilations():
    """Names of the events that XLA compilations (or loads of compiled programs) leave, in a list that grows."""
    events = []

    def listen(name, duration, **details):
        if name.endswith("backend_compile_duration"):
            events.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)
