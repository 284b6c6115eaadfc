# Toolchain file of the preset aarch64: a cross build for aarch64, whose tests run under qemu-user. Debian, Ubuntu:
# gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user.
#
#   cmake --preset aarch64 && cmake --build --preset aarch64
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
