#!/bin/sh
# Make the root filesystem of the image: image.sh SOURCE IMAGE, as root, on Debian 12.
#
# It holds what a program of Python needs of Debian, file by file, and /opt/ftckpt.
set -eu
source=$1 image=$2

apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    python3 python3-venv ca-certificates netbase media-types binutils

# An environment of its own, without torch.
python3 -m venv /opt/ftckpt
/opt/ftckpt/bin/pip install --no-cache-dir --no-compile "$source"
/opt/ftckpt/bin/pip uninstall -y pip setuptools

# What no verb reads: tests, headers and stubs, colours for source code, services that are not S3.
packages=$(echo /opt/ftckpt/lib/python3*/site-packages)
find "$packages" -depth -type d \( -name tests -o -name test -o -name include -o -name __pycache__ \) \
    -exec rm -rf {} +
find "$packages" \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.a' \) -delete
rm -rf "$packages"/numpy/f2py "$packages"/numpy/distutils "$packages"/zstandard/_cffi* \
    "$packages"/pygments "$packages"/pygments-*
for service in "$packages"/botocore/data/*/; do
    case $(basename "$service") in
        s3 | sts | sso | sso-oidc | signin) ;;
        *) rm -rf "$service" ;;
    esac
done
# Not what auditwheel has moved into NAME.libs: strip breaks the layout that it made.
find "$packages" -name '*.so*' -not -path '*.libs/*' -exec strip --strip-unneeded {} + 2>/dev/null || true
# Compiled once here: nobody can write them later, and Python starts at once.
/opt/ftckpt/bin/python -m compileall -q "$packages"

# Of Debian, the packages that Python itself and the compiled modules link to.
mkdir -p "$image/usr/bin" "$image/usr/lib" "$image/usr/lib64" "$image/usr/sbin" "$image/opt"
for name in bin lib lib64 sbin; do ln -s "usr/$name" "$image/$name"; done
dpkg -L libc6 libgcc-s1 libstdc++6 zlib1g libssl3 libffi8 libbz2-1.0 liblzma5 libexpat1 libuuid1 \
    libcrypt1 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib python3-minimal \
    ca-certificates netbase media-types |
    grep -vE '^/usr/share/(doc|man|locale|lintian|bug|menu)|/gconv/' |
    grep -vE '/python3.11/(lib2to3|idlelib|turtledemo|ensurepip|pydoc_data|curses|sqlite3|tkinter)/' |
    grep -vE '/lib-dynload/(_curses|_sqlite3|readline|nis|_dbm|_tkinter)' |
    sort -u | while read -r path; do
        if [ -f "$path" ] || [ -L "$path" ]; then
            real=$(readlink -f "$(dirname "$path")")
            mkdir -p "$image$real"
            cp -a "$path" "$image$real/"
        fi
    done
mkdir -p "$image/etc/ssl/certs"
cp -L /etc/ssl/certs/ca-certificates.crt "$image/etc/ssl/certs/"
rm -rf "$image/usr/share/ca-certificates"
ldconfig -r "$image"
python3 -m compileall -q -d /usr/lib/python3.11 "$image/usr/lib/python3.11" || true
cp -a /opt/ftckpt "$image/opt/"

# Nobody's account.
mkdir -p "$image/home/nonroot" "$image/tmp" "$image/proc" "$image/dev" "$image/sys"
chmod 1777 "$image/tmp"
chown 65532:65532 "$image/home/nonroot"
echo 'nonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin' > "$image/etc/passwd"
echo 'nonroot:x:65532:' > "$image/etc/group"
