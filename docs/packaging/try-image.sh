#!/bin/sh
# Try the image's commands in a clean root filesystem: try-image.sh [WORK], as root, with debootstrap.
#
# Runs image.sh in a fresh Debian 12, then ftckpt as nobody in what it made, and prints the size.
# PIP_* and proxy settings of the caller hold inside too; TRUST names a file of certificates to add.
set -eu
source=$(cd "$(dirname "$0")/../.." && pwd)
work=${1:-$(mktemp -d)}
root=$work/debian

[ -e "$root/etc/debian_version" ] || debootstrap --variant=minbase bookworm "$root"
rm -rf "$root/source" "$root/image" "$root/opt/ftckpt"
mkdir -p "$root/source"
# What the build context holds, without what git does not know.
(cd "$source" && git ls-files -z | grep -zv '^tests/' | tar --null -cf - -T -) | tar -C "$root/source" -xf -
cp /etc/resolv.conf "$root/etc/resolv.conf"
if [ -n "${TRUST:-}" ]; then
    mkdir -p "$root/etc/ssl/certs"
    cp -L "$TRUST" "$root/trust.crt"
    # requests prefers its own variable to pip's.
    export PIP_CERT=/trust.crt REQUESTS_CA_BUNDLE=/trust.crt SSL_CERT_FILE=/trust.crt
    unset SSL_CERT_DIR PIP_FIND_LINKS || true
fi
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
trap 'umount "$root/proc" "$root/dev"' EXIT
# The line of the Containerfile.
chroot "$root" sh /source/docs/packaging/image.sh /source /image

megabytes() { wc -c | awk '{printf "%d MB", $1 / 1000000}'; }
echo "image: $(tar -C "$root/image" -cf - . | megabytes), $(tar -C "$root/image" -czf - . | megabytes) compressed"
mkdir -p "$root/image/ckpt"
cp -r "$source/tests/data/run" "$root/image/ckpt/"
inside() {
    env -i HOME=/home/nonroot LANG=C.UTF-8 \
        "$(command -v chroot)" --userspec=65532:65532 "$root/image" /opt/ftckpt/bin/ftckpt "$@"
}
inside --version
inside verify /ckpt/run --all
inside ls /ckpt/run
inside convert /ckpt/run@1 /home/nonroot/weights --to safetensors
inside doctor /home/nonroot
code=0
inside ls s3://bucket/x --endpoint http://127.0.0.1:9 --retry-seconds 0 || code=$?
[ "$code" = 10 ] || [ "$code" = 11 ] || { echo "s3:// ended with $code"; exit 1; }
echo "all of it runs as nobody"
