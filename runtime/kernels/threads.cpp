#include "threads.h"

#include "affinity.h"

#include <chrono>
#include <climits>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ropeway {
namespace {

// Longer than the skew between threads of a balanced kernel (a few microseconds), far shorter than
// a scheduler's time slice (milliseconds).
constexpr int64_t kSpinNanoseconds = 50'000;
// Between two steps the host samples and schedules for about a millisecond: a thread that blocked
// then would be woken twice a step (2% of a decode step of 32 requests). No barrier
// waits for a thread that spins here: a neighbour that takes its core meanwhile stops nobody.
constexpr uint32_t kIdleSpins = 24;  // times as long as at a barrier

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield" ::: "memory");
#endif
}

// One pause takes 10 to 150 cycles, so their number is measured once instead of guessed.
uint32_t spins_for(int64_t nanoseconds) {
    using Clock = std::chrono::steady_clock;
    constexpr int kProbe = 2000;
    int64_t best = INT64_MAX;
    for (int attempt = 0; attempt < 3; ++attempt) {
        const auto start = Clock::now();
        for (int i = 0; i < kProbe; ++i) relax();
        const auto taken = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start);
        best = taken.count() < best ? taken.count() : best;
    }
    const int64_t spins = nanoseconds * kProbe / (best > 0 ? best : 1);
    return static_cast<uint32_t>(spins < 100 ? 100 : spins > 1'000'000 ? 1'000'000 : spins);
}

uint32_t default_spins() {
    static const uint32_t spins = spins_for(kSpinNanoseconds);
    return spins;
}

}  // namespace

void WaitWord::wait_while(uint32_t seen, uint32_t spins) {
    for (uint32_t i = 0; i < spins; ++i) {
        if (load() != seen) return;
        relax();
    }
    while (load() == seen) block_while(seen);
}

#if defined(__linux__)

void WaitWord::block_while(uint32_t seen) {
    static_assert(sizeof(word_) == 4, "a futex is 32 bits");
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    // The kernel compares again before it sleeps, so an advance() in between isn't lost.
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAIT_PRIVATE, seen, nullptr,
            nullptr, 0);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void WaitWord::advance() {
    word_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) {
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, INT_MAX,
                nullptr, nullptr, 0);
    }
}

#else

void WaitWord::block_while(uint32_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return load() != seen; });
}

void WaitWord::advance() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        word_.fetch_add(1, std::memory_order_seq_cst);
    }
    changed_.notify_all();
}

#endif

// Threads that may move are woken on the caller's own core as often as not, and share it until the
// system notices: a time to first token of 57 ms instead of 27.
Team::Team(int size, bool pin)
    : size_(size), cores_(pin && size > 1 ? cores_for_team(size) : std::vector<int>()),
      spins_(default_spins()) {
    threads_.reserve(static_cast<size_t>(size - 1));
    try {
        for (int thread = 1; thread < size; ++thread) {
            threads_.emplace_back([this, thread] { work(thread); });
        }
    } catch (...) {
        stop_ = true;
        job_.advance();
        for (auto& thread : threads_) thread.join();
        throw;
    }
}

Team::~Team() {
    stop_ = true;
    job_.advance();
    for (auto& thread : threads_) thread.join();
}

void Team::run(Task task, void* argument) {
    task_ = task;
    argument_ = argument;
    if (!cores_.empty()) move_to(cores_[0]);
    if (size_ > 1) job_.advance();
    task(argument, 0);
    barrier();
}

void Team::barrier() {
    if (size_ == 1) return;
    const uint32_t generation = generation_.load();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        arrived_.store(0, std::memory_order_relaxed);
        generation_.advance();
        return;
    }
    generation_.wait_while(generation, spins_);
}

void Team::work(int thread) {
    if (!cores_.empty()) stay_on(cores_[static_cast<size_t>(thread)]);
    uint32_t seen = 0;
    for (;;) {
        job_.wait_while(seen, kIdleSpins * spins_);
        ++seen;
        if (stop_) return;
        task_(argument_, thread);
        barrier();
    }
}

}  // namespace ropeway
