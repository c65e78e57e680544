#!/bin/sh
# Builds the library that loses unsynced writes and prints its path: build.sh DIRECTORY
# Use: LD_PRELOAD=$(build.sh /tmp) UNSYNCED_DIR=DATA-DIRECTORY program …   (see unsynced.c)
set -eu
out="$1/libunsynced.so"
# Under a name of its own first: several builds may run at once.
${CC:-cc} -shared -fPIC -O2 -Wall -Wextra -o "$out.$$" "$(dirname "$0")/unsynced.c" -ldl -lpthread
mv "$out.$$" "$out"
echo "$out"
