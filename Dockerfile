# Images for NVIDIA GPUs, and for CPUs:
#
#   docker build -t llmtrain .
#   docker build -t llmtrain:cpu --build-arg BASE=debian:bookworm-slim \
#       --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
#
# The base for GPUs has CUDA's compiler, since DeepSpeed compiles its offload to disks when it is first used. The major
# version of CUDA must be that of PyTorch's build (torch.version.cuda).
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
FROM ${BASE}

# Triton and DeepSpeed call the C++ compiler at run time; the deepspeed launcher reaches other hosts by ssh and pdsh.
# Versions are those of the base's distribution, which keeps only the newest of each package.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install -y --no-install-recommends \
        ca-certificates g++ libaio-dev ninja-build openssh-client pdsh python3-dev python3-venv && \
    rm -rf /var/lib/apt/lists/*

# Containers run without root; the number is what Kubernetes checks for that.
RUN useradd --create-home --uid 10001 llmtrain && \
    mkdir /workspace && chown llmtrain /workspace
USER 10001
ENV PATH=/home/llmtrain/venv/bin:$PATH

WORKDIR /home/llmtrain/source
COPY --chown=llmtrain pyproject.toml constraints.txt README.md LICENSE ./
COPY --chown=llmtrain llmtrain llmtrain
COPY --chown=llmtrain packages packages
COPY --chown=llmtrain recipes recipes
ARG TORCH_INDEX=
ARG EXTRAS=wandb,liger,fp8
RUN python3 -m venv /home/llmtrain/venv && \
    pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ./packages/lint ".[$EXTRAS]" && \
    cp -r recipes /workspace/

WORKDIR /workspace
CMD ["llmtrain", "--help"]
