#!/usr/bin/env bash
# bullseye.sh FOLDER: makes the userland of Debian 11, which has glibc 2.31, in FOLDER unless it is
# there, with a CPython 3.11 in /opt/python, which Debian 11 itself lacks. Needs root.
set -euo pipefail

source=https://deb.debian.org/debian/pool/main/p/python3.11/python3.11_3.11.2.orig.tar.gz
hash=2411c74bda5bbcfcddaf4531f66d1adc73f247f529aee981b029513aefdbf849
[ ! -e "$1/opt/python/bin/python3" ] || exit 0

rm -rf "$1"
debootstrap --variant=minbase --include=gcc,make,libc6-dev,zlib1g-dev,libffi-dev bullseye "$1" \
  http://deb.debian.org/debian
curl -sSf "$source" -o "$1/root/python.tar.gz"
echo "$hash $1/root/python.tar.gz" | sha256sum --check --quiet
chroot "$1" sh -c "cd /root && tar xf python.tar.gz && cd Python-* &&
  ./configure --quiet --prefix=/opt/python --without-ensurepip --disable-test-modules CFLAGS=-O1 &&
  make --quiet -j$(nproc) && make --quiet install && rm -rf /root/*"
