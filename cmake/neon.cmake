# Toolchain of the preset neon: cross-compiles for aarch64 and runs tests under qemu-user. scripts/test-neon unpacks Highway,
# fmt and GoogleTest for arm64 into build/neon/root; nlohmann-json comes from this machine.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_PREFIX_PATH ${CMAKE_CURRENT_LIST_DIR}/../build/neon/root/usr)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
