import time, torch
from helicon.quantize import *
def t(f, n=20):
    for _ in range(3): f()
    torch.cuda.synchronize(); s=time.perf_counter()
    for _ in range(n): f()
    torch.cuda.synchronize(); return (time.perf_counter()-s)/n*1e3
for name,q,shape in [("lfq16", LookupFreeQuantizer(256, 65536), (16,256,256)),
   ("rlfq mesh", ResidualLFQ(192,2,16384,soft_clamp_input_value=10.,experimental_softplus_entropy_loss=True),(32,400,192))]:
    q=q.cuda(); x=torch.randn(*shape,device="cuda",requires_grad=True)
    def f(m):
        r=m(x); torch.autograd.grad(r.values.square().sum()+r.loss, x)
    e=t(lambda: f(q)); s=time.time(); c=torch.compile(q, fullgraph=True); f(c); f(c); s=time.time()-s
    print(name, "eager %.2f ms"%e, "inductor %.2f ms"%t(lambda: f(c)), "compile %.1f s"%s, "mem %.2f GiB"%(torch.cuda.max_memory_allocated()/2**30), flush=True)
    g=torch.cuda.CUDAGraph(); s=torch.cuda.Stream()
    with torch.cuda.stream(s):
        f(q); torch.cuda.synchronize()
    with torch.cuda.graph(g, stream=s): f(q)
    print("   graph replay %.3f ms"%t(g.replay))
