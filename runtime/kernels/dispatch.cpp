// Chooses the level at run time, and says how much scratch the kernels need (for any level, so that
// a plan's memory doesn't depend on the machine).
#include <cstdlib>
#include <cstring>
#include <string>

#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ropeway {

const KernelTable* table_amx();
const KernelTable* table_avx512bf16();
const KernelTable* table_avx512();
const KernelTable* table_avx2();
const KernelTable* table_generic();

namespace {

#if defined(__x86_64__)
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}
bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
bool ask_for_amx() {
#if defined(__linux__)
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22;
    if ((edx & kTile) == 0 || (edx & kBf16) == 0) return false;
    // The system saves tile state only for processes that asked: ARCH_REQ_XCOMP_PERM for
    // XFEATURE_XTILEDATA.
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}
bool has_amx() {
    static const bool granted = has_avx512bf16() && ask_for_amx();
    return granted;
}
#else
bool has_avx2() { return false; }
bool has_avx512() { return false; }
bool has_avx512bf16() { return false; }
bool has_amx() { return false; }
#endif
bool has_generic() { return true; }

struct Level {
    const char* name;
    bool (*runs)();
    const KernelTable* (*table)();
};
constexpr Level kLevels[] = {
    {"amx", has_amx, table_amx},
    {"avx512_bf16", has_avx512bf16, table_avx512bf16},
    {"avx512", has_avx512, table_avx512},
    {"avx2", has_avx2, table_avx2},
    {"generic", has_generic, table_generic},
};

}  // namespace

const KernelTable* select_kernels(const char* name) {
    if (name == nullptr || *name == '\0') name = std::getenv("ROPEWAY_ISA");
    const bool any = name == nullptr || *name == '\0';
    for (const Level& level : kLevels)
        if ((any || std::strcmp(level.name, name) == 0) && level.runs()) return level.table();
    return nullptr;
}

const char* available_kernels() {
    static const std::string names = [] {
        std::string all;
        for (const Level& level : kLevels)
            if (level.runs()) all += (all.empty() ? "" : ",") + std::string(level.name);
        return all;
    }();
    return names.c_str();
}

ScratchNeed gemm_scratch(const GemmArgs& args) {
    const int64_t kp =
        round_up(args.k, kPanel) + 32;  // and a cache line: packed_stride() in gemm.h
    const int64_t few = args.rows < 8 ? args.rows : 8;
    // A chunk of packed rows, f32 at its widest: chunk_rows() in gemm.h keeps it within this.
    const int64_t least = 192 * kp * 4, all = args.rows * kp * 4;
    const int64_t chunk = kGemmChunkBytes > least ? kGemmChunkBytes : least;
    const int64_t most = all < chunk ? all : chunk;
    return {size_t(args.rows < kGemmOwnRows ? few * kp * 4 : most), size_t(most)};
}

ScratchNeed attention_scratch(const AttentionArgs& args, int64_t max_length, int threads) {
    constexpr int64_t kRows = 64;  // at least kQueryRows of every level
    const int64_t dp = round_up(args.head_dim, kPanel) + 32,
                  dvp = round_up(args.v_head_dim, kPanel);
    const int64_t per_thread = kRows * (dp + 2 * kTileTokens + 2 * dvp + 8) * 4 + 4096;
    const bool splits = threads > 1 && max_length > kTileTokens;
    return {size_t(per_thread), splits ? size_t(kAttentionSplitBytes) : 0};
}

}  // namespace ropeway

extern "C" __attribute__((visibility("default"))) uint64_t
ropeway_checksum_words(const uint8_t* data, uint64_t nbytes, uint64_t first) {
    // Any level gives the same sum; a ROPEWAY_ISA that names nothing is reported where kernels are
    // chosen, not here.
    const ropeway::KernelTable* kernels = ropeway::select_kernels(nullptr);
    if (kernels == nullptr) kernels = ropeway::select_kernels("generic");
    return kernels->checksum_words(data, nbytes, first);
}
