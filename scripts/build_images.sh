#!/bin/sh
# Build the images of deploy/Dockerfile with Debian's podman, without a registry of images: `make images`, as root.
#
#   scripts/build_images.sh PREFIX TORCH [PACKAGE_INDEX]    makes PREFIX/depot, PREFIX/demo and PREFIX/vllm
#
# Debian's packages stand in for the official image of Python, and vLLM for CPUs for the official image of vLLM. pip
# downloads torch here, as the machine's own settings may name a folder that has its wheel.
set -eu
prefix=$1 torch=$2 index=${3:-}
. /etc/os-release
work=$(mktemp -d /var/tmp/kvdepot-images.XXXXXX)  # not in memory: a system's files, and an archive of them
trap 'rm -rf "$work"' EXIT
export CONTAINERS_CONF="$PWD/tests/images/containers.conf"
# HEALTHCHECK exists in Docker's format only. The certificates are the machine's, as its packages' index may be a mirror.
build() {
  podman build --quiet --format docker --network host \
    --volume /etc/ssl/certs/ca-certificates.crt:/etc/ssl/certs/ca-certificates.crt:ro \
    --volume "$work/wheels:/wheels:ro" --volume "$work/pip.conf:/etc/pip.conf:ro" --tag "$@"
}

mkdir "$work/wheels"
printf '[global]\nfind-links = /wheels\nretries = 1\n' > "$work/pip.conf"

echo "the base: Python of Debian $VERSION_CODENAME"
# python3-dev: torch compiles kernels that include Python's headers, which the official image has, too.
debootstrap --variant=minbase --include=python3-dev,python3-pip,python3-venv,ca-certificates \
  "$VERSION_CODENAME" "$work/base" > "$work/log" || { tail "$work/log"; exit 1; }
ln -s python3 "$work/base/usr/bin/python"
rm "$work"/base/usr/lib/python3*/EXTERNALLY-MANAGED
python=$(basename "$(readlink "$work/base/usr/bin/python3")")
tar --create --directory "$work/base" . | podman import --quiet - "$prefix/base"

echo "the server"
build "$prefix/depot" --build-arg BASE="$prefix/base" --file deploy/Dockerfile .

echo "the demo: vLLM for CPUs"
"${PIP_PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --retries 1 --dest "$work/wheels" \
  --python-version "${python#python}" --only-binary :all: ${index:+--extra-index-url "$index"} "torch==$torch"
build "$prefix/demo" --build-arg BASE="$prefix/base" --build-arg TORCH="$torch" --target demo --file deploy/Dockerfile .

echo "the engine: the same vLLM under what deploy/Dockerfile adds to vLLM's own image"
printf '%s\n' "FROM $prefix/demo" "USER root" 'ENTRYPOINT ["vllm", "serve"]' \
  "RUN userdel kvdepot && pip uninstall --yes kvdepot && pip install uv" \
  "ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt" | build "$prefix/engine" --file - "$work/wheels"
build "$prefix/vllm" --build-arg ENGINE="$prefix/engine" --build-arg BASE="$prefix/base" --target vllm --file deploy/Dockerfile .
