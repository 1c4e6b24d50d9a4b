#!/usr/bin/env bash
# Builds Horovod 0.28.1, its last release, for the PyTorch of the active environment, and installs it there.
#
#   scripts/install_horovod.sh
#
# Needs g++ with C++17, cmake 3.13 or newer, make, and a package index: its source is downloaded and
# checked. Takes about six minutes on two cores. Collectives go over gloo, without MPI; for GPUs set
# what Horovod's own build reads, as in HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_HOME=/usr/local/nccl.
set -euo pipefail

version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0

fail() {
    printf 'install_horovod: %s\n' "$*" >&2
    exit 1
}

# Replaces one line of a source file; fails where the file has not the line that is meant.
patch_line() {
    local file=$1 old=$2 new=$3
    grep -qxF -- "$old" "$file" || fail "$file has no line '$old': is this Horovod $version?"
    OLD=$old NEW=$new python - "$file" <<'PYTHON'
import os, pathlib, sys

path = pathlib.Path(sys.argv[1])
lines = path.read_text().split("\n")
path.write_text("\n".join(os.environ["NEW"] if line == os.environ["OLD"] else line for line in lines))
PYTHON
}

for tool in python cmake make "${CXX:-g++}"; do
    command -v "$tool" >/dev/null || fail "needs $tool, which is not on the PATH"
done
python -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' ||
    fail "activate a virtual environment first: Horovod is built for its PyTorch and installed there"
python -c 'import torch' 2>/dev/null || fail "the active environment has no torch: pip install -c constraints.txt -e packages/lint -e . first"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The build runs without isolation, to see torch; setuptools builds wheels by itself since 70.1.
python -m pip install --quiet 'setuptools>=77' packaging cloudpickle psutil pyyaml cffi
printf 'horovod==%s --hash=sha256:%s\n' "$version" "$sha256" >"$work/requirements.txt"
python -m pip download --quiet --no-binary :all: --no-deps --no-build-isolation --require-hashes \
    --requirement "$work/requirements.txt" --dest "$work" || fail "cannot download the source of Horovod $version"
tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
source="$work/horovod-$version"

# PyTorch's headers have been C++17 since 2.1.
patch_line "$source/CMakeLists.txt" 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 17)'
patch_line "$source/horovod/torch/CMakeLists.txt" '    set(CMAKE_CXX_STANDARD 14)' '    set(CMAKE_CXX_STANDARD 17)'
# distutils left Python with 3.12.
patch_line "$source/horovod/runner/js_run.py" \
    'from distutils.spawn import find_executable' 'from shutil import which as find_executable'
# shellcheck disable=SC2016  # the variable is CMake's
patch_line "$source/horovod/torch/CMakeLists.txt" \
    'execute_process(COMMAND ${PY_EXE} -c "from distutils.sysconfig import get_python_inc; print(get_python_inc())"' \
    'execute_process(COMMAND ${PY_EXE} -c "import sysconfig; print(sysconfig.get_path('\''include'\''))"'
# No debug symbols: they double the time of the build.
patch_line "$source/setup.py" \
    "        config = 'Debug' if self.debug or os.environ.get('HOROVOD_DEBUG') == \"1\" else 'RelWithDebInfo'" \
    "        config = 'Release'"

export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1
# Its own gloo asks for a CMake older than CMake 4 will still imitate.
export CMAKE_POLICY_VERSION_MINIMUM=3.5
export MAKEFLAGS=${MAKEFLAGS:--j$(nproc)}

printf 'building Horovod %s for torch %s\n' "$version" "$(python -c 'import torch; print(torch.__version__)')"
python -m pip wheel --quiet --no-deps --no-build-isolation --use-pep517 --wheel-dir "$work" "$source" ||
    fail "the build failed; its messages are above"
python -m pip install --quiet --no-deps --force-reinstall "$work"/horovod-*.whl

# From elsewhere, so that nothing but what was installed is found.
cd "$work"
python -c 'import horovod.torch as hvd; hvd.init(); assert hvd.gloo_built(); hvd.shutdown()' ||
    fail "Horovod was built, but does not load"
printf 'installed Horovod %s\n' "$version"
