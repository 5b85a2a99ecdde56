// Runs steps one after another on a thread of its own, so that the host prepares the next one and
// reads the one before meanwhile.
//
// Contract: jobs run in the order in which they were posted; nothing of the host's comes between a
// replay, its sampling and the next job. All memory that a job points to stays the poster's, who
// leaves it alone until the job was waited for. One thread posts and waits. While jobs are queued
// nobody else uses the program, the team or the sampler.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "executor.h"
#include "sampling.h"
#include "threads.h"

namespace ropeway {

// The records mirror ctypes structures in runtime/devices/cpu/records.py.

// Refills a penalty slot before the step samples.
struct SlotFill {
    int64_t slot;
    const int32_t* prompt;
    int64_t prompt_count;
    const int32_t* output;
    int64_t output_count;
};

struct StepJob {
    int32_t bucket;
    int32_t follows;  // not 0: the job before wasn't waited for when this one was posted
    StepData data;
    // data.ids and data.slots once more, to be written: token t whose feed[t] isn't -1 is what row
    // feed[t] of the job before drew. Null: the ids are all known.
    const int32_t* feed;
    int32_t* ids;
    int32_t* const* slots;
    const int64_t* copies;  // pairs of blocks
    int64_t copy_count;
    const SlotFill* fills;
    int64_t fill_count;
    SampleArgs sample;  // of count rows; none are sampled when that is 0
    RunReport report;   // written: why it didn't run, if so
};

class StepQueue {
public:
    // `spare`: there is a core for the host beside the team's. Throws std::system_error.
    StepQueue(Program* program, Team* team, bool spare);
    // Cancels.
    ~StepQueue();
    StepQueue(const StepQueue&) = delete;
    StepQueue& operator=(const StepQueue&) = delete;

    // The job's number, modulo 2^32; -1 when kJobs are queued that weren't done yet.
    int64_t post(StepJob* job);
    // Returns once the job of this number is done.
    void wait(uint32_t number);
    // Returns once every posted job is done.
    void drain() { wait(count_); }
    // Stops jobs that haven't begun; returns once none runs.
    void cancel();

private:
    static constexpr uint32_t kJobs = 4;

    void work();
    RunReport run(StepJob& job);
    RunReport step(StepJob& job);
    RunReport take_feed(StepJob& job) const;
    void sample(StepJob& job);

    Program* program_;
    Team* team_;
    const uint32_t host_spins_, idle_spins_;
    StepJob* jobs_[kJobs] = {};
    uint32_t count_ = 0;            // jobs posted; the poster's own
    std::atomic<bool> cancel_{false}, stop_{false};
    bool failed_ = false;           // the last job did; the thread's own, as is last_
    std::vector<int32_t> last_;     // what the last job drew, by row
    alignas(64) WaitWord posted_;
    alignas(64) WaitWord done_;
    std::thread thread_;
};

}  // namespace ropeway
