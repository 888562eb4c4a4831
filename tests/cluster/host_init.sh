#!/bin/bash
# The first process of a test host, in namespaces of its own: gives it private files, then serves ssh until killed.
#   host_init.sh NAME TOP DISK KEEP...
# TOP is an empty folder that every host fills with files of its own; DISK becomes its home, and outlives it; KEEP are
# folders that must stay visible.
set -euo pipefail
name=$1 top=$2 disk=$3
shift 3

hostname "$name"
mount --make-rprivate /

mount -t tmpfs -o mode=755,size=64m tmpfs "$top"
mkdir -p "$top/home" "$top/etc" "$top/keep"
mount --bind "$disk" "$top/home"
index=0
for folder in "$@"; do
    mkdir -p "$top/keep/$index" && mount --bind "$folder" "$top/keep/$index" && index=$((index + 1))
done

# Everything temporary, shared memory and what runs are the host's own.
mount -t tmpfs -o mode=1777,size=2g tmpfs /tmp
mount -t tmpfs -o mode=1777,size=16g tmpfs /dev/shm
mount -t tmpfs -o mode=755,size=64m tmpfs /run
mkdir -p /run/sshd
index=0
for folder in "$@"; do
    [ -e "$folder/." ] || { mkdir -p "$folder" && mount --bind "$top/keep/$index" "$folder"; }
    index=$((index + 1))
done

# A home of its own, and a hosts file that knows nobody else: addresses must do.
sed "s#^root:.*#root:x:0:0:root:$top/home:/bin/bash#" /etc/passwd >"$top/etc/passwd"
mount --bind "$top/etc/passwd" /etc/passwd
# Without PAM, sshd lets nobody in whose password is locked, even with a key.
if [ -e /etc/shadow ]; then
    (umask 077 && sed "s#^root:[^:]*:#root:*:#" /etc/shadow >"$top/etc/shadow")
    mount --bind "$top/etc/shadow" /etc/shadow
fi
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$name" >"$top/etc/hosts"
mount --bind "$top/etc/hosts" /etc/hosts
ssh-keygen -q -t ed25519 -N '' -f "$top/etc/host_key"
cat >"$top/etc/sshd_config" <<CONFIG
HostKey $top/etc/host_key
PidFile none
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
StrictModes no
MaxSessions 100
MaxStartups 100
CONFIG

cd /
/usr/sbin/sshd -D -e -f "$top/etc/sshd_config" &
sshd=$!
# The first process of a PID namespace inherits orphans; bash reaps them while it waits.
while kill -0 "$sshd" 2>/dev/null; do wait "$sshd" || true; done
