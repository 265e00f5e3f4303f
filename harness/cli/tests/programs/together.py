"""Programs of one table that start one Python: each runs in a fork of this process, which has imported torch and has not used the GPU.

Each argument is a program with its arguments. Prints a line of JSON for each, with its process ID, its exit code and its standard output.
"""
import atexit, json, os, runpy, sys, tempfile, traceback, torch

folder = sys.path[0]
if any("optim" in open(os.path.join(folder, command.split()[0])).read() for command in sys.argv[1:]):
    import torch._dynamo  # The first optimizer imports it.
for command in sys.argv[1:]:
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.dup2(output.fileno(), 1)
                sys.argv = command.split()
                runpy.run_path(os.path.join(folder, sys.argv[0]), run_name="__main__")
                atexit._run_exitfuncs()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        print(json.dumps({"program": command, "pid": child, "code": code, "output": output.read()}), flush=True)
