/*
 * Part of the interface of doorbell.h: versions, error codes, timeouts, devices and protection domains.
 *
 * doorbell.h has the rules for results, handles, threads and text buffers.
 */
#ifndef DOORBELL_CORE_H
#define DOORBELL_CORE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------- version */

#define DOORBELL_VERSION_MAJOR 0
#define DOORBELL_VERSION_MINOR 1
#define DOORBELL_VERSION_PATCH 0

/*
 * Returns the version of the library: major << 24 | minor << 12 | patch. Before 1.0, each minor version may change the
 * interface.
 */
uint32_t doorbell_version(void);

/* Returns the version of the library as a text, such as "0.1.0". */
const char *doorbell_version_text(void);

/* -------------------------------------------------------------------------------------------------------- errors */

enum doorbell_error {
	DOORBELL_OK = 0,
	/* An argument is invalid: a null pointer, an unknown flag, an impossible struct_size. */
	DOORBELL_EINVAL = -1,
	/* The handle was destroyed, has another type, or is no handle. A handle that was destroyed long ago (1024
	   objects since) or never was one is only detected in builds with debug assertions. */
	DOORBELL_EHANDLE = -2,
	/* Another thread is using the object. */
	DOORBELL_EBUSY = -3,
	/* The library panicked; this is a bug of the library. The objects of the call can only be destroyed. */
	DOORBELL_EPANIC = -4,
	/* A number is outside its limits. The text names the limits. */
	DOORBELL_ERANGE = -10,
	/* An address or offset is not aligned as required. */
	DOORBELL_EALIGNMENT = -11,
	/* A range of bytes is not inside its region. */
	DOORBELL_EBOUNDS = -12,
	/* A program does not fit into its fixed space. */
	DOORBELL_EPROGRAM = -13,
	/* Objects of different devices or protection domains were combined. */
	DOORBELL_EFOREIGN = -14,
	/* The send or receive queue is full. */
	DOORBELL_EFULL = -15,
	/* The object is in the wrong state for this call: not connected, deregistered, out of order. */
	DOORBELL_ESTATE = -16,
	/* The timeout of the call passed. The work that was waited for continues. */
	DOORBELL_ETIMEOUT = -17,
	/* Work that was queued on the stream earlier has failed. See doorbell_stream_synchronize. */
	DOORBELL_EASYNC = -18,
	/* The endpoint has failed. doorbell_last_failure has the details. */
	DOORBELL_EWORK = -19,
	/* The operating system returned an error. The text has the reason. */
	DOORBELL_ESYSTEM = -20,
	/* Bytes or a text have the wrong format: an address, a message of a foreign program. */
	DOORBELL_EMALFORMED = -21,
	/* A process of the group has ended. The text has its rank. */
	DOORBELL_ERANK = -22,
	/* The CUDA driver returned an error. The text has the driver function and its code. */
	DOORBELL_ECUDA = -23,
	/* The library was built without the feature that the call needs. The text names the feature. */
	DOORBELL_EFEATURE = -24,
	/* The peer did not accept the connection. The text has the reason that the connection manager reports. */
	DOORBELL_EREFUSED = -25
};

/* Why an endpoint failed: doorbell_failure.cause. */
enum doorbell_cause {
	/* No operation failed. */
	DOORBELL_CAUSE_NONE = 0,
	/* The device completed a work request with an error: see wc_status, syndrome and vendor_syndrome. */
	DOORBELL_CAUSE_COMPLETION = 1,
	/* A wait on a stream took longer than timeout_ms and was released. */
	DOORBELL_CAUSE_DEADLINE = 2,
	/* The queue pair is in the error state: the peer failed, or a request of the peer was refused. */
	DOORBELL_CAUSE_QUEUE_PAIR = 3,
	/* A completion queue overran. */
	DOORBELL_CAUSE_OVERRUN = 4,
	/* A stream failed or was aborted before it executed the operation. */
	DOORBELL_CAUSE_DISCARDED = 5,
	/* doorbell_endpoint_abort was called. */
	DOORBELL_CAUSE_ABORTED = 6,
	/* A trigger word of the proxy path had a value that no operation stores: other code wrote to it. */
	DOORBELL_CAUSE_TRIGGER = 7,
	/* doorbell_endpoint_destroy was called. */
	DOORBELL_CAUSE_DROPPED = 8,
	/* A rank of the group, see `rank`, has ended or failed. */
	DOORBELL_CAUSE_RANK = 9,
	/* The wait of another CUDA stream for the same word was given up by a store to that word, and this wait may have ended by it. */
	DOORBELL_CAUSE_SUBSTITUTE = 10
};

/* Why an operation, and with it its endpoint, failed. */
typedef struct doorbell_failure {
	uint64_t wr_id;           /* ID of the work request that failed, if has_wr_id is 1; for
				     DOORBELL_CAUSE_DEADLINE of the oldest one in the queue that was not done */
	uint32_t has_wr_id;       /* 0 or 1 */
	uint32_t qpn;             /* number of the endpoint's queue pair; 0 for a wait for a value */
	uint32_t cause;           /* DOORBELL_CAUSE_* */
	uint32_t wc_status;       /* enum ibv_wc_status of verbs.h; for DOORBELL_CAUSE_COMPLETION */
	uint32_t syndrome;        /* from the error CQE */
	uint32_t vendor_syndrome; /* from the error CQE */
	int64_t timeout_ms;       /* of the wait, in ms; for DOORBELL_CAUSE_DEADLINE */
	uint32_t rank;            /* for DOORBELL_CAUSE_RANK */
	uint32_t reserved_word;   /* 0 */
	uint64_t reserved[2];     /* 0 */
} doorbell_failure;

/*
 * Returns the text of the last failure of a call in this thread, or "" if no call has failed. Successful calls do not
 * change it. The text belongs to the library and is valid until the next failure in this thread.
 */
const char *doorbell_last_error(void);

/*
 * Writes the details of the last failure of a call in this thread to `failure`. Returns 1 if that call returned
 * DOORBELL_EWORK. Returns 0 and writes nothing if it returned another code or no call has failed.
 */
int doorbell_last_failure(doorbell_failure *failure);

/* Returns the name of a code, such as "DOORBELL_ETIMEOUT", or "unknown". The text is static. */
const char *doorbell_error_name(int code);

/* ------------------------------------------------------------------------------------------------------ timeouts */

/* Timeouts are in milliseconds, 0 or more, or one of these values. */

/* No timeout. */
#define DOORBELL_NO_TIMEOUT (-1)
/* The wait_timeout_ms of the endpoint; 30 s for calls without an endpoint. */
#define DOORBELL_DEFAULT_TIMEOUT (-2)

/* ------------------------------------------------------------------------------------------------------- devices */

/* A NIC, or the software ConnectX. */
typedef struct doorbell_device doorbell_device;

/* A protection domain. Regions and endpoints work together only in the same domain; most programs need one. */
typedef struct doorbell_domain doorbell_domain;

/* Returns the number of devices of this machine. The software ConnectX, "softcx", is always one of them. */
int doorbell_device_count(void);

/* Writes the name of device `index` to a text buffer. Indices start at 0; the preferred device comes first. */
int doorbell_device_name(uint32_t index, char *name, size_t capacity);

/* Opens a device by its name. For "softcx", each call creates a new software NIC with its own engine thread. */
int doorbell_device_open(const char *name, doorbell_device **device);

/*
 * Destroys the handle. The device is closed when no object that was made from it remains. NULL is allowed.
 * Threads: alone with device.
 */
int doorbell_device_close(doorbell_device *device);

/*
 * Lets a software device do part of its work in the calling thread. Returns 1 if there was work, 0 if not. No program
 * needs this call; it makes a loop that polls memory faster.
 */
int doorbell_device_progress(const doorbell_device *device);

/* Counters of a software NIC since it was opened. For hardware, the operating system has counters in sysfs. */
typedef struct doorbell_device_counters {
	uint32_t struct_size;
	uint32_t reserved;                /* 0 */
	uint64_t doorbells;               /* doorbells seen */
	uint64_t doorbells_before_record; /* doorbells that came before the doorbell record: a bug of the sender */
	uint64_t doorbells_backwards;     /* doorbells that came after a later one: a bug of the sender */
	uint64_t wqes;                    /* work requests started */
	uint64_t packets_sent;            /* without effects of fault injection */
	uint64_t packets_received;        /* packets taken by a queue pair */
	uint64_t packets_dropped;         /* packets for no queue pair, or for an earlier connection */
	uint64_t retransmissions;         /* times a sender went back to repeat packets */
	uint64_t rnr_naks;                /* times a peer was told that no receive is posted */
	uint64_t completions;             /* completions written */
	uint64_t congestion_notices;      /* congestion notifications (CNPs) that came for queue pairs; only with UDP */
} doorbell_device_counters;

/*
 * Reads the counters: doorbell_device_read_counters(device, &counters, sizeof counters). All counters are 0 if the
 * device is not a software ConnectX in this process.
 */
int doorbell_device_read_counters(const doorbell_device *device, doorbell_device_counters *counters,
				  uint32_t struct_size);

/*
 * Describes the device and the control paths that are available on it, best first: one line for each
 * DOORBELL_CONTROL_*, with the reason why it can or cannot be used. Creates and destroys one endpoint for each path.
 * The result goes to a text buffer.
 */
int doorbell_device_describe(const doorbell_device *device, char *text, size_t capacity);

/*
 * Describes the features of this library, the devices of this machine, and what the GPU of the current context (or
 * else the first GPU) supports, with reasons for what it does not. The text is for people and for bug reports. It goes
 * to a text buffer.
 */
int doorbell_describe(char *text, size_t capacity);

/* Creates a protection domain. */
int doorbell_domain_create(const doorbell_device *device, doorbell_domain **domain);

/* Returns a new handle of the domain's device, which the caller closes; for example the device of a group's domain. */
int doorbell_domain_device(const doorbell_domain *domain, doorbell_device **device);

/*
 * Destroys the handle. The domain is closed with the last region and endpoint in it. NULL is allowed.
 * Threads: alone with domain.
 */
int doorbell_domain_destroy(doorbell_domain *domain);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_CORE_H */
