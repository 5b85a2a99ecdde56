// A C entry that runs one kind of kernel by itself, for the kernel tests and benchmarks
// (tests/support/kernels.py).
//
// The caller passes the argument structs of kernels.h as they lie in memory; their size is checked,
// nothing else is. Scratch is filled with NaN before every test run, so a kernel that reads what it
// didn't write is found.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

#include "kernels.h"
#include "threads.h"

namespace {
using namespace ropeway;

struct Aligned {
    explicit Aligned(size_t bytes)
        : size(std::max<size_t>(bytes, 64)), data(::operator new(size, std::align_val_t(64))) {
        std::memset(data, 0xff, size);
    }
    ~Aligned() { ::operator delete(data, std::align_val_t(64)); }
    Aligned(const Aligned&) = delete;
    Aligned& operator=(const Aligned&) = delete;
    size_t size;
    void* data;
};

struct Reading {  // the bandwidth probe has no struct of its own
    const void* data;
    int64_t bytes;
};

struct Call {
    const KernelTable* kernels;
    const char* name;
    const char* args;
    int64_t size, count;
    Team* team;
    char* scratch;
    size_t per_thread;
    void* shared;
    uint64_t sums[256];
};

bool is(const char* a, const char* b) { return std::strcmp(a, b) == 0; }

template <class Args>
bool run_as(const Call& call, const Context& ctx, const char* name,
            void (*kernel)(const Context&, const Args&)) {
    if (!is(call.name, name)) return false;
    for (int64_t i = 0; i < call.count; i++) {
        kernel(ctx, *(const Args*)(call.args + i * call.size));
        call.team->barrier();
    }
    return true;
}

void run_thread(void* argument, int thread) {
    Call& call = *(Call*)argument;
    Context ctx;
    ctx.rank = thread;
    ctx.size = call.team->size();
    ctx.scratch = call.scratch + (size_t)thread * call.per_thread;
    ctx.shared = call.shared;
    ctx.team = call.team;
    ctx.barrier = [](void* team, int) { ((Team*)team)->barrier(); };
    const KernelTable& k = *call.kernels;
    if (is(call.name, "read_sum")) {
        const Reading& r = *(const Reading*)call.args;
        const int64_t from = r.bytes / 64 * thread / ctx.size * 64,
                      to = r.bytes / 64 * (thread + 1) / ctx.size * 64;
        call.sums[thread] = k.read_sum((const char*)r.data + from, (size_t)(to - from));
        return;
    }
    run_as(call, ctx, "gemm", k.gemm) || run_as(call, ctx, "rms_norm", k.rms_norm) ||
        run_as(call, ctx, "layer_norm", k.layer_norm) || run_as(call, ctx, "glu", k.glu) ||
        run_as(call, ctx, "rope", k.rope) || run_as(call, ctx, "embedding", k.embedding) ||
        run_as(call, ctx, "gather_rows", k.gather_rows) || run_as(call, ctx, "unary", k.unary) ||
        run_as(call, ctx, "binary", k.binary) || run_as(call, ctx, "reduce", k.reduce) ||
        run_as(call, ctx, "softmax", k.softmax) || run_as(call, ctx, "kv_write", k.kv_write) ||
        run_as(call, ctx, "attention", k.attention);
}

int64_t args_size(const char* name) {
    return is(name, "gemm")          ? sizeof(GemmArgs)
           : is(name, "rms_norm")    ? sizeof(RmsNormArgs)
           : is(name, "layer_norm")  ? sizeof(LayerNormArgs)
           : is(name, "glu")         ? sizeof(GluArgs)
           : is(name, "rope")        ? sizeof(RopeArgs)
           : is(name, "embedding")   ? sizeof(EmbeddingArgs)
           : is(name, "gather_rows") ? sizeof(GatherRowsArgs)
           : is(name, "unary")       ? sizeof(UnaryArgs)
           : is(name, "binary")      ? sizeof(BinaryArgs)
           : is(name, "reduce")      ? sizeof(ReduceArgs)
           : is(name, "softmax")     ? sizeof(SoftmaxArgs)
           : is(name, "kv_write")    ? sizeof(KvWriteArgs)
           : is(name, "attention")   ? sizeof(AttentionArgs)
           : is(name, "read_sum")    ? sizeof(Reading)
                                     : -1;
}

ScratchNeed need_of(const Call& call, int64_t max_length, int threads) {
    ScratchNeed most;
    for (int64_t i = 0; i < call.count; i++) {
        ScratchNeed need;
        if (is(call.name, "gemm"))
            need = gemm_scratch(*(const GemmArgs*)(call.args + i * call.size));
        if (is(call.name, "attention"))
            need = attention_scratch(*(const AttentionArgs*)(call.args + i * call.size), max_length,
                                     threads);
        most.per_thread = std::max(most.per_thread, need.per_thread);
        most.shared = std::max(most.shared, need.shared);
    }
    most.per_thread = size_t(round_up((int64_t)most.per_thread, 64));
    return most;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) const char* ropeway_kernel_levels() {
    return available_kernels();
}

// Runs `count` calls (an array of argument structs, a barrier after each) on `threads` threads,
// `repeats` times. Returns the best time in seconds; -1 unknown level, -2 unknown kernel or a
// struct of another size, -3 out of memory or threads.
__attribute__((visibility("default"))) double ropeway_kernel_run(const char* level,
                                                                 const char* kernel, int threads,
                                                                 const void* args, int64_t size,
                                                                 int64_t count, int64_t max_length,
                                                                 int repeats) {
    const KernelTable* kernels = select_kernels(level);
    if (kernels == nullptr) return -1.0;
    if (args_size(kernel) != size || threads < 1 || threads > 256) return -2.0;
    try {
        Team team(threads);
        Call call = {kernels, kernel, (const char*)args, size, count, &team,
                     nullptr, 0,      nullptr,           {}};
        const ScratchNeed need = need_of(call, max_length, threads);
        Aligned own(need.per_thread * (size_t)threads), shared(need.shared);
        call.scratch = (char*)own.data;
        call.per_thread = need.per_thread;
        call.shared = shared.data;
        double best = 1e30;
        for (int i = 0; i < repeats; i++) {
            const auto start = std::chrono::steady_clock::now();
            team.run(run_thread, &call);
            best = std::min(
                best,
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
        return best;
    } catch (const std::exception&) {
        return -3.0;
    }
}
}
