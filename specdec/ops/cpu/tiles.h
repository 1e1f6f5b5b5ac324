// The AMX instructions that `amx.h` uses.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace amx {

constexpr int64_t LINE = 64; // bytes of a row of a tile

// What LDTILECFG reads: the size of every tile.
struct alignas(LINE) Shape {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {}; // of a row
  uint8_t rows[16] = {};
};

#ifndef SPECDEC_TILES_IN_SOFTWARE

// Whether this process may use the tiles. Linux gives them on demand, to all threads.
inline bool allowed() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool yes = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return yes;
}

template <int Tile>
inline void load_tile(const void* from) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(LINE), "i"(Tile) : "memory");
}

template <int Tile>
inline void store_tile(void* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(LINE), "i"(Tile) : "memory");
}

template <int Tile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

template <int Sum, int Rows, int Weights>
inline void add_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Rows), "i"(Weights));
}

inline void configure(const Shape& shape) {
  asm volatile("ldtilecfg %0" ::"m"(shape)); // GCC's intrinsic says that it reads 8 bytes of it
}

inline void release() {
  asm volatile("tilerelease");
}

#endif

} // namespace amx
