# Build:  docker build -t sage-grpo .
# Run:    docker run --gpus all --ipc host --ulimit memlock=-1 -it -v "$PWD/ckpts:/sage-grpo/ckpts" -v "$PWD/outputs:/sage-grpo/outputs" sage-grpo
# PyTorch's wheels bring CUDA, cuDNN and NCCL; the host needs the driver and NVIDIA's container toolkit.
FROM python:3.11-slim-bookworm

# Triton compiles its launchers with gcc, and the multi-node launcher calls pdsh over ssh.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev git make openssh-client pdsh procps \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /sage-grpo
COPY requirements.txt .
RUN pip install --no-cache-dir --requirement requirements.txt
COPY . .
RUN pip install --no-cache-dir --no-deps --editable .
CMD ["bash"]
