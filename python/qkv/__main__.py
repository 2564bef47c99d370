# SPDX-License-Identifier: Apache-2.0
"""python -m qkv: the command line. Runs the program that is shipped inside the package."""

import os
import sys


def main():
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "qkv")
    if not os.path.exists(program):
        sys.exit("qkv: this build of the package has no command line (bin/qkv is missing)")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(program, ["qkv", *sys.argv[1:]])


if __name__ == "__main__":
    main()
