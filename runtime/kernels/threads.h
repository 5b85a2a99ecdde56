// A team of persistent threads that meets at barriers.
//
// Waiting spins for some tens of microseconds (a millisecond between jobs) and then blocks in the
// kernel. Spinning alone is fastest on an idle machine but collapses (a step measured 100 times
// slower) as soon as another process takes a core, because the thread that everybody waits for is
// the one without a core.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#if !defined(__linux__)
#include <condition_variable>
#include <mutex>
#endif

namespace ropeway {

// A 32-bit word that threads can wait on until it changes.
class WaitWord {
public:
    uint32_t load() const { return word_.load(std::memory_order_acquire); }
    // Returns once the word differs from `seen`: at first spinning `spins` times, then blocked.
    void wait_while(uint32_t seen, uint32_t spins);
    // Adds one and wakes every waiter.
    void advance();

private:
    void block_while(uint32_t seen);

    std::atomic<uint32_t> word_{0};
    std::atomic<uint32_t> sleepers_{0};
#if !defined(__linux__)
    std::mutex mutex_;
    std::condition_variable changed_;
#endif
};

class Team {
public:
    using Task = void (*)(void* argument, int thread);

    // Starts size - 1 threads; the caller of run() is thread 0. With `pin` each thread keeps to a
    // core of its own where cores_for_team() finds them, and the caller starts each run on its own.
    // Throws std::system_error.
    explicit Team(int size, bool pin = true);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }
    // Rounds of spinning that a barrier takes before it blocks.
    uint32_t spins() const { return spins_; }
    // Runs task(argument, t) for every t in 0..size and returns when all have returned.
    // One caller at a time. A task must not throw.
    void run(Task task, void* argument);
    // Inside a task: returns once every thread of the team has called it.
    void barrier();

private:
    void work(int thread);

    const int size_;
    const std::vector<int> cores_;
    const uint32_t spins_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) WaitWord generation_;
    alignas(64) WaitWord job_;
    Task task_ = nullptr;
    void* argument_ = nullptr;
    bool stop_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace ropeway
