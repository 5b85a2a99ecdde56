// The C ABI of the executor, loaded by ctypes (runtime/devices/cpu/native.py). Handles are opaque.
// No exception leaves a function: creators return null when memory or threads run out.
#include <atomic>
#include <exception>

#include "executor.h"
#include "step_queue.h"

using ropeway::Program;
using ropeway::StepQueue;
using ropeway::Team;

ROPEWAY_API const char* rw_plan_signatures() { return ropeway::plan_signatures(); }
ROPEWAY_API const char* rw_available_kernels() { return ropeway::available_kernels(); }

// The name of the chosen instruction set, or null when `name` isn't available here.
ROPEWAY_API const char* rw_select_kernels(const char* name) {
    const ropeway::KernelTable* table = ropeway::select_kernels(name);
    return table != nullptr ? table->isa : nullptr;
}

ROPEWAY_API Team* rw_team_create(int32_t size, int32_t pin) {
    try {
        return new Team(size < 1 ? 1 : size, pin != 0);
    } catch (const std::exception&) {
        return nullptr;
    }
}
ROPEWAY_API void rw_team_destroy(Team* team) { delete team; }

// Calls task(argument, rank, size) on every thread of the team.
ROPEWAY_API void rw_team_run(Team* team, void (*task)(void*, int32_t, int32_t), void* argument) {
    struct Job {
        void (*task)(void*, int32_t, int32_t);
        void* argument;
        int32_t size;
    } job{task, argument, team->size()};
    team->run(
        [](void* given, int rank) {
            const Job& job = *static_cast<Job*>(given);
            job.task(job.argument, rank, job.size);
        },
        &job);
}

// Reads `bytes` (a multiple of 64 per thread) as fast as memory gives them; returns their word sum.
ROPEWAY_API uint64_t rw_team_read(Team* team, const void* data, int64_t bytes) {
    const ropeway::KernelTable* table = ropeway::select_kernels(nullptr);
    if (table == nullptr) return 0;
    struct Job {
        const ropeway::KernelTable* table;
        const char* data;
        int64_t part;
        int size;
        std::atomic<uint64_t> sum;
    } job{table, static_cast<const char*>(data), 0, team->size(), {0}};
    job.part = bytes / team->size() / 64 * 64;
    team->run(
        [](void* given, int rank) {
            Job& job = *static_cast<Job*>(given);
            job.sum += job.table->read_sum(job.data + rank * job.part, static_cast<size_t>(job.part));
        },
        &job);
    return job.sum;
}

struct RwProgramSpec {
    const ropeway::StepRecord* steps;
    const ropeway::WeightRecord* weights;
    const ropeway::CacheRecord* caches;
    const int64_t* row_bytes;
    int64_t step_count, weight_count, cache_count, buffer_count;
    int64_t max_length, groups, head;
    void* arena;
};

ROPEWAY_API Program* rw_program_create(Team* team, const RwProgramSpec* spec, const char* isa) {
    const ropeway::KernelTable* table = ropeway::select_kernels(isa);
    if (table == nullptr) return nullptr;
    try {
        return new Program(team, table, {spec->steps, spec->steps + spec->step_count},
                           {spec->weights, spec->weights + spec->weight_count},
                           {spec->caches, spec->caches + spec->cache_count},
                           {spec->row_bytes, spec->row_bytes + spec->buffer_count},
                           spec->max_length, spec->groups, spec->head, spec->arena);
    } catch (const std::exception&) {
        return nullptr;
    }
}
ROPEWAY_API void rw_program_destroy(Program* program) { delete program; }

// The bucket's number, or -1 when memory runs out.
ROPEWAY_API int32_t rw_program_add_bucket(Program* program, int64_t tokens, int64_t requests,
                                          int64_t rows, const int64_t* offsets) {
    try {
        return program->add_bucket(tokens, requests, rows, offsets);
    } catch (const std::exception&) {
        return -1;
    }
}

ROPEWAY_API void rw_program_set_caches(Program* program, void* data, const int64_t* key_offsets,
                                       const int64_t* value_offsets, int64_t blocks,
                                       int64_t block_bytes) {
    program->set_caches(data, key_offsets, value_offsets, blocks, block_bytes);
}

ROPEWAY_API void rw_program_copy_blocks(Program* program, const int64_t* pairs, int64_t count) {
    program->copy_blocks(pairs, count);
}

ROPEWAY_API void rw_program_run(Program* program, int32_t bucket, const ropeway::StepData* data,
                                int64_t limit, int64_t* stamps, ropeway::RunReport* report) {
    *report = program->run(bucket, *data, limit, stamps);
}

ROPEWAY_API void rw_program_peaks(const Program* program, ropeway::Peaks* peaks) {
    *peaks = program->peaks();
}

ROPEWAY_API void rw_program_run_together(Program* program, const int32_t* buckets,
                                         const ropeway::StepData* data, int64_t count,
                                         int64_t limit, ropeway::RunReport* report) {
    *report = program->run_together(buckets, data, count, limit);
}

// Null when the system gives no thread.
ROPEWAY_API StepQueue* rw_queue_create(Program* program, Team* team, int32_t spare) {
    try {
        return new StepQueue(program, team, spare != 0);
    } catch (const std::exception&) {
        return nullptr;
    }
}
ROPEWAY_API void rw_queue_destroy(StepQueue* queue) { delete queue; }

// The job's number, or -1 when too many are queued.
ROPEWAY_API int64_t rw_queue_post(StepQueue* queue, ropeway::StepJob* job) {
    return queue->post(job);
}
ROPEWAY_API void rw_queue_wait(StepQueue* queue, uint32_t number) { queue->wait(number); }
ROPEWAY_API void rw_queue_drain(StepQueue* queue) { queue->drain(); }
ROPEWAY_API void rw_queue_cancel(StepQueue* queue) { queue->cancel(); }

ROPEWAY_API int32_t rw_record_bytes(int32_t which) {
    switch (which) {
        case 0: return sizeof(ropeway::RefRecord);
        case 1: return sizeof(ropeway::StepRecord);
        case 2: return sizeof(ropeway::WeightRecord);
        case 3: return sizeof(ropeway::CacheRecord);
        case 4: return sizeof(ropeway::StepData);
        case 5: return sizeof(ropeway::RunReport);
        case 6: return sizeof(ropeway::Peaks);
        case 7: return sizeof(ropeway::SlotFill);
        default: return sizeof(ropeway::StepJob);
    }
}
