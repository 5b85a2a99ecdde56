#include "step_queue.h"

#include <new>

namespace ropeway {
namespace {

// Between the end of the last queued job and the next one, in units of a barrier's spinning. A host
// that shares its core with this thread would wait for it.
constexpr uint32_t kIdleSpins = 24;

RunReport fault(Fault kind) { return {static_cast<int32_t>(kind), 0, 0, 0, 0}; }

// Whether `number` comes after `done`; both wrap around.
bool later(uint32_t number, uint32_t done) { return static_cast<int32_t>(number - done) > 0; }

}  // namespace

StepQueue::StepQueue(Program* program, Team* team, bool spare)
    : program_(program), team_(team), host_spins_(spare ? team->spins() : 0),
      idle_spins_(spare ? kIdleSpins * team->spins() : team->spins()) {
    thread_ = std::thread([this] { work(); });
}

StepQueue::~StepQueue() {
    cancel();
    stop_ = true;
    posted_.advance();
    thread_.join();
}

int64_t StepQueue::post(StepJob* job) {
    if (count_ - done_.load() >= kJobs) return -1;
    jobs_[count_ % kJobs] = job;
    ++count_;
    posted_.advance();
    return count_;
}

void StepQueue::wait(uint32_t number) {
    for (uint32_t done = done_.load(); later(number, done); done = done_.load()) {
        done_.wait_while(done, host_spins_);
    }
}

void StepQueue::cancel() {
    cancel_ = true;
    drain();
    cancel_ = false;
}

void StepQueue::work() {
    for (uint32_t taken = 0;; ++taken) {
        posted_.wait_while(taken, idle_spins_);
        if (stop_) return;
        StepJob& job = *jobs_[taken % kJobs];
        job.report = run(job);
        done_.advance();
    }
}

RunReport StepQueue::run(StepJob& job) {
    if (job.follows == 0) failed_ = false;
    RunReport report = fault(Fault::stopped);
    if (!failed_ && !cancel_) {
        try {
            report = step(job);
        } catch (const std::bad_alloc&) {
            report = fault(Fault::no_memory);
        }
    }
    failed_ = report.fault != 0;
    return report;
}

RunReport StepQueue::step(StepJob& job) {
    program_->copy_blocks(job.copies, job.copy_count);
    RunReport report = take_feed(job);
    last_.clear();
    if (report.fault != 0) return report;
    report = program_->run(job.bucket, job.data, -1, nullptr);
    if (report.fault != 0) return report;
    for (int64_t i = 0; i < job.fill_count; ++i) {
        const SlotFill& fill = job.fills[i];
        const int32_t status = ropeway_sampler_reset_slot(
            job.sample.sampler, static_cast<int32_t>(fill.slot), fill.prompt, fill.prompt_count,
            fill.output, fill.output_count);
        if (status != 0) return fault(Fault::no_memory);
    }
    if (job.sample.count > 0) sample(job);
    last_.assign(job.sample.tokens, job.sample.tokens + job.sample.count);
    return report;
}

// A draw that failed feeds no token: its row is computed, as id 0, but kept in no block.
RunReport StepQueue::take_feed(StepJob& job) const {
    if (job.feed == nullptr) return {};
    const auto rows = static_cast<int64_t>(last_.size());
    for (int64_t t = 0; t < job.data.tokens; ++t) {
        const int64_t row = job.feed[t];
        if (row < 0) continue;
        if (row >= rows) return {static_cast<int32_t>(Fault::feed), 0, t, row, rows};
        const int32_t token = last_[static_cast<size_t>(row)];
        job.ids[t] = token < 0 ? 0 : token;
        for (int64_t g = 0; g < job.data.groups && token < 0; ++g) job.slots[g][t] = -1;
    }
    return {};
}

void StepQueue::sample(StepJob& job) {
    const Peaks peaks = program_->peaks();
    job.sample.peaks = peaks.parts;
    job.sample.peak_parts = peaks.count;
    job.sample.peak_rows = peaks.rows;
    job.sample.peak_only = peaks.parts != nullptr ? job.data.peak_only : nullptr;
    struct Task {
        const SampleArgs* args;
        int size;
    } task{&job.sample, team_->size()};
    team_->run(
        [](void* given, int rank) {
            const Task& task = *static_cast<Task*>(given);
            sample_rows(*task.args, rank, task.size);
        },
        &task);
}

}  // namespace ropeway
