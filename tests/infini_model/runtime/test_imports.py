"""Threads that need obstore while another one imports it."""

import subprocess
import sys

# In the middle of the import, when its module `store` is there and the rest is not.
PROGRAM = """
import sys, threading, traceback
from infini_model.runtime.store_client import _make_client

got, threads = [], []

def second():
    _make_client("s3://bucket", 0.0, ())
    got.append("head" in vars(sys.modules["obstore"]))

def trace(frame, event, _):
    if not frame.f_code.co_filename.endswith("obstore/__init__.py"):
        return None
    if event == "line" and "store" in frame.f_globals:
        sys.settrace(None)
        frame.f_trace = None
        thread = threading.Thread(target=second)
        threads.append(thread)
        thread.start()
        # Until it is done, or waits for this import.
        while thread.is_alive():
            stack = traceback.extract_stack(sys._current_frames().get(thread.ident))
            if any(each.name == "acquire" and "importlib" in each.filename for each in stack):
                break
        return None
    return trace

sys.settrace(trace)
import obstore
threads[0].join()
sys.exit(got != [True])
"""


def test_a_thread_waits_until_another_one_has_imported_all_of_obstore() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
