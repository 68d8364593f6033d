/* A stand-in for libnixl, libplugin_UCX, libucp and Mooncake's engine.so, under whichever name it is compiled: functions of
   their names that touch nothing of what they are handed. Released libraries fault on pointers that lead nowhere before a test
   could see what the probes make of them. */
#include <stdint.h>
#include <unistd.h>

typedef uint64_t word;

/* 0, so that only the instruction is there from which the agent decodes where a handle's status is. */
static volatile int touch;
static const word HANG = 1;

static void hang(word on)
{
	while (on == HANG)
		pause();
}

int create(word self, ...) __asm__("_ZNK9nixlAgent13createXferReqEv");
int create(word self, ...)
{
	hang(self);
	return 0;
}

int make(word self, ...) __asm__("_ZNK9nixlAgent11makeXferReqERK14nixl_xfer_op_tPK10nixlDlistHRKSt6vectorv");
int make(word self, ...)
{
	return 0;
}

int post(word self, word handle, word options)
	__asm__("_ZNK9nixlAgent11postXferReqEP12nixlXferReqHPK21nixlAgentOptionalArgs");
int post(word self, word handle, word options)
{
	hang(self);
	return 1;
}

int release(word self, char *handle) __asm__("_ZNK9nixlAgent14releaseXferReqEP12nixlXferReqH");
int release(word self, char *handle)
{
	if (touch && *(int *)(handle + 184) == 1)
		return -1;
	return 0;
}

int arrived(word self, word header, word header_length, word data, word length, word parameter)
	__asm__("_ZN13nixlUcxEngine9notifAmCbEPvPKvmS0_mPK17ucp_am_recv_param");
int arrived(word self, word header, word header_length, word data, word length, word parameter)
{
	return 0;
}

int send(word self, word peer, word message) __asm__("_ZNK13nixlUcxEngine13notifSendPrivEv");
int send(word self, word peer, word message)
{
	return 0;
}

void ucp_ep_flush_completion(word completion)
{
}

/* Mooncake's methods return their status in memory that the caller names. */
word submit(word result, word self, word batch, word requests) __asm__(
	"_ZN8mooncake14MultiTransport14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE");
word submit(word result, word self, word batch, word requests)
{
	return result;
}

word free_batch(word result, word self, word batch) __asm__("_ZN8mooncake14MultiTransport11freeBatchIDEm");
word free_batch(word result, word self, word batch)
{
	return result;
}
