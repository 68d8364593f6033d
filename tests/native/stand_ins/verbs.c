/* A stand-in for libibverbs and an RDMA device, for LD_PRELOAD: what Mooncake's rdma transport calls (0.3.7 to 0.3.13), by the
 * public <infiniband/verbs.h> alone. One device `fake0` with one port; RC queue pairs between processes of this machine. Mooncake
 * 0.3.9 does not take it: it wants the port's network device, which it looks for in /sys/class/infiniband.
 *
 * A work request is kept at ibv_post_send and carried out by whoever polls its completion queue: RDMA WRITE and READ by
 * process_vm_writev and process_vm_readv, with the peer's rkey and bounds checked. So Mooncake's own code makes the requests, finds
 * this file's poll_cq through ops.poll_cq as it finds a driver's, and handles what it returns; timings, and bytes that move without
 * anybody polling, are not those of hardware. No completion ever arrives at the peer, as for RDMA WRITE without immediate.
 *
 * FAKE_VERBS_STATE names a file that all processes map; its head is the control, written by the tests (see fake_verbs.py). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define QUEUE_PAIRS 1024
#define REGIONS 1024
#define FIRST_QPN 0x100
#define SEGMENTS 16
#define QUEUE 8192 /* work requests of one completion queue */
#define NEW(type, ...) memcpy(calloc(1, sizeof(type)), &(type){ __VA_ARGS__ }, sizeof(type))

enum mode { CARRY_OUT, STALL, FAIL };
struct state {
    _Atomic uint32_t mode, status, failures, delay_us; /* the control: fail that many with that ibv_wc_status */
    _Atomic uint64_t posted, completed, failed;        /* counted here */
    struct { _Atomic uint32_t used, pid, destination; } pairs[QUEUE_PAIRS];
    struct { _Atomic uint32_t used, pid; uint64_t address, length; } regions[REGIONS];
};
struct request { struct ibv_qp *pair; uint64_t id, ready_ns, remote; uint32_t key; int opcode, signaled, segments;
                 struct iovec local[SEGMENTS]; };
struct completion_queue { struct ibv_cq cq; pthread_mutex_t lock; unsigned head, tail; struct request requests[QUEUE]; };
struct pair { struct ibv_qp qp; int signal_all; };

static struct state *state;
static struct ibv_device device = { .node_type = IBV_NODE_CA, .transport_type = IBV_TRANSPORT_IB, .name = "fake0",
                                    .dev_name = "uverbs-fake0" };

static __attribute__((constructor)) void map_state(void) {
    const char *path = getenv("FAKE_VERBS_STATE");
    if (!path) return; /* a process that only inherited LD_PRELOAD */
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof *state)) { perror("FAKE_VERBS_STATE"); abort(); }
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (state == MAP_FAILED) { perror("FAKE_VERBS_STATE"); abort(); }
}

static uint64_t now_ns(void) {
    struct timespec time = { 0 };
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}
static int take(_Atomic uint32_t *used) { uint32_t no = 0; return atomic_compare_exchange_strong(used, &no, 1); }

/* Moves the bytes of a request; what a device would report of it. */
static enum ibv_wc_status carry_out(const struct request *request) {
    uint32_t failures = state->failures;
    if (request->pair->state == IBV_QPS_ERR) return IBV_WC_WR_FLUSH_ERR;
    if (state->mode == FAIL && failures && atomic_compare_exchange_strong(&state->failures, &failures, failures - 1))
        return state->status;
    uint32_t peer = state->pairs[request->pair->qp_num - FIRST_QPN].destination - FIRST_QPN, region = (request->key >> 8) - 1;
    if (peer >= QUEUE_PAIRS || !state->pairs[peer].used) return IBV_WC_RETRY_EXC_ERR;
    size_t length = 0;
    for (int at = 0; at < request->segments; at++) length += request->local[at].iov_len;
    pid_t pid = state->pairs[peer].pid;
    if (region >= REGIONS || !state->regions[region].used || state->regions[region].pid != (uint32_t)pid
        || request->remote < state->regions[region].address
        || request->remote + length > state->regions[region].address + state->regions[region].length)
        return IBV_WC_REM_ACCESS_ERR;
    struct iovec remote = { (void *)request->remote, length };
    ssize_t moved = request->opcode == IBV_WR_RDMA_READ
                        ? process_vm_readv(pid, request->local, request->segments, &remote, 1, 0)
                        : process_vm_writev(pid, request->local, request->segments, &remote, 1, 0);
    return moved == (ssize_t)length ? IBV_WC_SUCCESS : IBV_WC_RETRY_EXC_ERR; /* the peer is gone */
}

/* Static, and reached through ops.poll_cq alone, as a driver's. */
static __attribute__((noinline)) int poll_cq(struct ibv_cq *cq, int limit, struct ibv_wc *found) {
    struct completion_queue *queue = (struct completion_queue *)cq;
    int count = 0;
    if (queue->head == queue->tail || state->mode == STALL) return 0;
    pthread_mutex_lock(&queue->lock);
    for (uint64_t now = now_ns(); count < limit && queue->head != queue->tail; queue->head++) {
        struct request *request = &queue->requests[queue->head % QUEUE];
        if (!request->pair) continue; /* its queue pair was destroyed */
        if (request->ready_ns + state->delay_us * 1000ull > now) break;
        enum ibv_wc_status status = carry_out(request);
        atomic_fetch_add(status ? &state->failed : &state->completed, 1);
        if (status) request->pair->state = IBV_QPS_ERR;
        if (!status && !request->signaled) continue;
        found[count++] = (struct ibv_wc){
            .wr_id = request->id, .status = status, .vendor_err = status ? 0x81 : 0, .qp_num = request->pair->qp_num,
            .opcode = request->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE };
    }
    pthread_mutex_unlock(&queue->lock);
    return count;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *work, struct ibv_send_wr **bad) {
    struct completion_queue *queue = (struct completion_queue *)qp->send_cq;
    int error = 0;
    pthread_mutex_lock(&queue->lock);
    for (; work; work = work->next) {
        *bad = work;
        if (queue->tail - queue->head == QUEUE) { error = ENOMEM; break; }
        int known = work->opcode == IBV_WR_RDMA_WRITE || work->opcode == IBV_WR_RDMA_READ;
        if (!known || work->num_sge > SEGMENTS) { error = EINVAL; break; }
        struct request *request = &queue->requests[queue->tail++ % QUEUE];
        *request = (struct request){ .pair = qp, .id = work->wr_id, .ready_ns = now_ns(), .remote = work->wr.rdma.remote_addr,
                                     .key = work->wr.rdma.rkey, .opcode = work->opcode, .segments = work->num_sge,
                                     .signaled = ((struct pair *)qp)->signal_all || work->send_flags & IBV_SEND_SIGNALED };
        for (int at = 0; at < work->num_sge; at++)
            request->local[at] = (struct iovec){ (void *)work->sg_list[at].addr, work->sg_list[at].length };
        atomic_fetch_add(&state->posted, 1);
    }
    pthread_mutex_unlock(&queue->lock);
    return error;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *work, struct ibv_recv_wr **bad) { return 0; }
static int req_notify_cq(struct ibv_cq *cq, int solicited) { return 0; }

static int port(struct ibv_context *context, uint8_t number, struct ibv_port_attr *to, size_t size) {
    struct ibv_port_attr port = { .state = IBV_PORT_ACTIVE, .max_mtu = IBV_MTU_4096, .active_mtu = IBV_MTU_4096, .gid_tbl_len = 1,
                                  .max_msg_sz = 1u << 30, .pkey_tbl_len = 1, .active_width = 2, .active_speed = 16,
                                  .phys_state = 5, .link_layer = IBV_LINK_LAYER_ETHERNET };
    memcpy(to, &port, size < sizeof port ? size : sizeof port);
    return 0;
}

struct ibv_context *ibv_open_device(struct ibv_device *of) {
    struct verbs_context *made = calloc(1, sizeof *made);
    if (!state) { fputs("fake verbs: FAKE_VERBS_STATE is not set\n", stderr); abort(); }
    made->sz = sizeof *made;
    made->query_port = port;
    made->context = (struct ibv_context){
        .device = of, .abi_compat = __VERBS_ABI_IS_EXTENDED, .num_comp_vectors = 1,
        .cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC), .async_fd = eventfd(0, EFD_CLOEXEC), /* no event ever comes */
        .ops = { .poll_cq = poll_cq, .req_notify_cq = req_notify_cq, .post_send = post_send, .post_recv = post_recv } };
    return &made->context;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *domain, struct ibv_qp_init_attr *wanted) {
    for (int at = 0; at < QUEUE_PAIRS; at++) {
        if (!take(&state->pairs[at].used)) continue;
        state->pairs[at].pid = getpid();
        state->pairs[at].destination = 0;
        struct ibv_qp qp = { .context = domain->context, .qp_context = wanted->qp_context, .pd = domain,
                             .send_cq = wanted->send_cq, .recv_cq = wanted->recv_cq, .qp_num = at + FIRST_QPN,
                             .state = IBV_QPS_RESET, .qp_type = wanted->qp_type };
        return NEW(struct pair, .qp = qp, .signal_all = wanted->sq_sig_all);
    }
    errno = ENOMEM;
    return NULL;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *to, int mask) {
    if (mask & IBV_QP_STATE) qp->state = to->qp_state;
    if (mask & IBV_QP_DEST_QPN) state->pairs[qp->qp_num - FIRST_QPN].destination = to->dest_qp_num;
    return 0;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *to, int mask, struct ibv_qp_init_attr *wanted) {
    *to = (struct ibv_qp_attr){ .qp_state = qp->state, .cur_qp_state = qp->state };
    *wanted = (struct ibv_qp_init_attr){ .qp_type = qp->qp_type };
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp) {
    struct completion_queue *queue = (struct completion_queue *)qp->send_cq;
    pthread_mutex_lock(&queue->lock);
    for (unsigned at = queue->head; at != queue->tail; at++)
        if (queue->requests[at % QUEUE].pair == qp) queue->requests[at % QUEUE].pair = NULL;
    pthread_mutex_unlock(&queue->lock);
    state->pairs[qp->qp_num - FIRST_QPN].used = 0;
    free(qp);
    return 0;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *domain, void *address, size_t length, uint64_t iova, unsigned access) {
    for (uint32_t at = 0; at < REGIONS; at++) {
        if (!take(&state->regions[at].used)) continue;
        state->regions[at].pid = getpid();
        state->regions[at].address = (uintptr_t)address;
        state->regions[at].length = length;
        return NEW(struct ibv_mr, .context = domain->context, .pd = domain, .addr = address, .length = length,
                   .lkey = (at + 1) << 8, .rkey = (at + 1) << 8);
    }
    errno = ENOMEM;
    return NULL;
}
#undef ibv_reg_mr
struct ibv_mr *ibv_reg_mr(struct ibv_pd *domain, void *address, size_t length, int access) {
    return ibv_reg_mr_iova2(domain, address, length, (uintptr_t)address, access);
}
int ibv_dereg_mr(struct ibv_mr *region) { state->regions[(region->rkey >> 8) - 1].used = 0; free(region); return 0; }

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int size, void *of, struct ibv_comp_channel *channel, int vector) {
    struct completion_queue *made = calloc(1, sizeof *made); /* all zeros is an unlocked mutex */
    made->cq = (struct ibv_cq){ .context = context, .channel = channel, .cq_context = of, .cqe = size };
    return &made->cq;
}
int ibv_destroy_cq(struct ibv_cq *cq) { free(cq); return 0; }

#undef ibv_query_port
int ibv_query_port(struct ibv_context *context, uint8_t number, struct _compat_ibv_port_attr *to) {
    return port(context, number, (struct ibv_port_attr *)to, offsetof(struct ibv_port_attr, port_cap_flags2));
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *to) {
    *to = (struct ibv_device_attr){ .max_mr_size = ~0ull, .max_qp = QUEUE_PAIRS, .max_qp_wr = 4096, .max_sge = SEGMENTS,
                                    .max_cq = 1024, .max_cqe = QUEUE, .max_mr = REGIONS, .phys_port_cnt = 1 };
    return 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t number, int index, union ibv_gid *to) {
    static const uint8_t loopback[16] = { [10] = 0xff, 0xff, 127, 0, 0, 1 };
    memcpy(to, loopback, sizeof loopback);
    return index ? -1 : 0;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t number, uint32_t index, struct ibv_gid_entry *to, uint32_t flags,
                      size_t size) {
    *to = (struct ibv_gid_entry){ .gid_index = index, .port_num = number, .gid_type = IBV_GID_TYPE_ROCE_V2, .ndev_ifindex = 1 };
    return ibv_query_gid(context, number, index, &to->gid) ? ENODATA : 0;
}

/* Its thread waits for async_fd first, which no event makes ready. */
int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) { return -1; }

struct ibv_device **ibv_get_device_list(int *count) {
    static struct ibv_device *list[2] = { &device };
    if (count) *count = 1;
    return list;
}
void ibv_free_device_list(struct ibv_device **list) {}
const char *ibv_get_device_name(struct ibv_device *of) { return of->name; }
int ibv_close_device(struct ibv_context *context) { close(context->cmd_fd); close(context->async_fd); return 0; }
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) { return NEW(struct ibv_pd, .context = context); }
int ibv_dealloc_pd(struct ibv_pd *domain) { free(domain); return 0; }
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
    return NEW(struct ibv_comp_channel, .context = context, .fd = eventfd(0, EFD_CLOEXEC));
}
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) { close(channel->fd); free(channel); return 0; }
int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **of) { return -1; }
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned count) {}
void ibv_ack_async_event(struct ibv_async_event *event) {}
int ibv_fork_init(void) { return 0; }
