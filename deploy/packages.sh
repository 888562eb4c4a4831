#!/bin/sh
# What installing Baton needs of a fresh Debian or Ubuntu machine: a setup command of the `ray up` files for clouds.
set -eu

# A machine that has just booted is still being set up, and then updates itself: wait for the one and for the other.
if command -v cloud-init >/dev/null; then cloud-init status --wait >/dev/null || true; fi

# Ray gives its commands a terminal: without these, packages would ask questions on it.
apt() {
    sudo env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=a apt-get -q -o DPkg::Lock::Timeout=600 "$@"
}

attempt=1
until apt update; do
    [ "$attempt" -lt 20 ] || exit 1
    attempt=$((attempt + 1))
    sleep 15
done
apt install -y make python3-venv
