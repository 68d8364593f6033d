"""The functions that the agent's probes can be on, by engine, library and role. A name that ends in `*` is a prefix."""

STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE"
CREATE = (f"_ZNK9nixlAgent13createXferReqERK14nixl_xfer_op_tRK12nixlDescListI13nixlBasicDescES7_RK{STRING}"
          "ERP12nixlXferReqHPK21nixlAgentOptionalArgs")
MAKE = ("_ZNK9nixlAgent11makeXferReqERK14nixl_xfer_op_tPK10nixlDlistHRKSt6vectorIiSaIiEES5_SA_RP12nixlXferReqH"
        "PK21nixlAgentOptionalArgs")
MAKE_SPAN = ("_ZNK9nixlAgent11makeXferReqE14nixl_xfer_op_tRK10nixlDlistHSt4spanIKiLm18446744073709551615EES3_S6_"
             "RP12nixlXferReqHPK21nixlAgentOptionalArgs")
POST = "_ZNK9nixlAgent11postXferReqEP12nixlXferReqHPK21nixlAgentOptionalArgs"
STATUS = "_ZNK9nixlAgent13getXferStatusEP12nixlXferReqH"
RELEASE = "_ZNK9nixlAgent14releaseXferReqEP12nixlXferReqH"
NOTIFY_CALLBACK = "_ZN13nixlUcxEngine9notifAmCbEPvPKvmS0_mPK17ucp_am_recv_param"
ERROR_CALLBACK = "_ZN9nixlUcxEp6err_cbEP6ucp_ep12ucs_status_t"
RANGE = "_ZNK13nixlUcxEngine13sendXferRangeERK*"
ALLOCATE = "_ZN8mooncake14MultiTransport15allocateBatchIDEm"
SUBMIT = "_ZN8mooncake14MultiTransport14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE"
FREE = "_ZN8mooncake14MultiTransport11freeBatchIDEm"

# library -> where it is in an unpacked wheel, the first that exists
FILES = {
    "libnixl": (".nixl*.mesonpy.libs/libnixl.so",),
    "libplugin_UCX": (".nixl*.mesonpy.libs/plugins/libplugin_UCX.so",),
    "libucp": ("nixl*.libs/libucp-*.so*",),
    "libuct": ("nixl*.libs/libuct-*.so*",),
    "libuct_ib": ("nixl*.libs/ucx/libuct_ib.so*",),
    "libuct_ib_mlx5": ("nixl*.libs/ucx/libuct_ib_mlx5.so*", "nixl*.libs/ucx/libuct_ib.so*"),
    "engine": ("mooncake/engine.so",),
}

PROBES = {
    "nixl": [
        ("libnixl", "createXferReq", CREATE),
        ("libnixl", "makeXferReq (vector)", MAKE),
        ("libnixl", "makeXferReq (span)", MAKE_SPAN),
        ("libnixl", "postXferReq", POST),
        ("libnixl", "getXferStatus", STATUS),
        ("libnixl", "releaseXferReq", RELEASE),
        ("libnixl", "genNotif", f"_ZNK9nixlAgent8genNotifERK{STRING}*"),
        ("libnixl", "getNotifs", "_ZN9nixlAgent9getNotifsERSt13unordered_map*"),
        ("libplugin_UCX", "sendXferRange", RANGE),
        ("libplugin_UCX", "notifAmCb", NOTIFY_CALLBACK),
        ("libplugin_UCX", "notifSendPriv", "_ZNK13nixlUcxEngine13notifSendPriv*"),
        ("libplugin_UCX", "sendNotif", "_ZN13nixlUcxEngine9sendNotif*"),
        ("libplugin_UCX", "err_cb", ERROR_CALLBACK),
        *((library, name, name) for library, names in {
            "libucp": "ucp_ep_flush_nbx ucp_ep_flush_completion ucp_proto_request_zcopy_completion ucp_ep_set_lanes_failed "
                      "ucp_ep_set_failed",
            "libuct": "uct_iface_handle_ep_err",
            "libuct_ib": "uct_rc_ep_send_op_completion_handler uct_rc_ep_flush_op_completion_handler "
                         "uct_rc_ep_get_zcopy_completion_handler uct_rc_txqp_purge_outstanding",
            "libuct_ib_mlx5": "uct_rc_mlx5_iface_handle_failure uct_ib_mlx5_completion_with_err",
        }.items() for name in names.split()),
    ],
    "mooncake": [
        ("engine", "allocateBatchID", ALLOCATE),
        ("engine", "submitTransfer", SUBMIT),
        ("engine", "submitTransfer (task ids)", f"{SUBMIT}PS1_ImSaImEE"),
        ("engine", "getBatchTransferStatus",
         "_ZN8mooncake14MultiTransport22getBatchTransferStatusEmRNS_9Transport14TransferStatusE"),
        ("engine", "getTransferStatus", "_ZN8mooncake14MultiTransport17getTransferStatusEmmRNS_9Transport14TransferStatusE"),
        ("engine", "freeBatchID", FREE),
        ("engine", "RdmaContext::poll", "_ZN8mooncake11RdmaContext4pollEiP6ibv_wci"),
        ("engine", "WorkerPool::performPollCq", "_ZN8mooncake10WorkerPool13performPollCq*"),
        ("engine", "WorkerPool::performPostSend", "_ZN8mooncake10WorkerPool15performPostSend*"),
        ("engine", "WorkerPool::redispatch", "_ZN8mooncake10WorkerPool10redispatch*"),
        ("engine", "TransferEngine::openSegment", "_ZN8mooncake14TransferEngine11openSegment*"),
    ],
}
